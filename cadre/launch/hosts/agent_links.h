// The connections between the agents of a job. Each is authenticated with the job's token
// (core/fabric/bootstrap/handshake.h) and carries messages, each after its length as a u32.
//
// Threads: one owner; connections are opened in threads of their own (BackgroundConnect). Blocking:
// never, except flush() until its deadline and the destructor, at most 1 s. Lifetime: borrows the
// System, the event and the log. Errors: none; a connection that fails is an Event, and the log has
// the reason. Format: docs/formats/agent-messages.md.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/log.h"
#include "cadre/core/fabric/bootstrap/background_connect.h"
#include "cadre/core/fabric/bootstrap/callers.h"
#include "cadre/core/fabric/bootstrap/handshake.h"
#include "cadre/core/os/system.h"
#include "cadre/core/wire/stream_buffer.h"
#include "cadre/launch/agent/agent.h"
#include "cadre/launch/agent/message.h"

namespace cadre::launch {

class AgentLinks {
 public:
  static constexpr size_t kMaxMessageBytes = 64 << 20;

  // What happened to a connection. Connections that this agent opens have the ids that connect()
  // got; those that it accepts have odd ids.
  struct Event {
    enum class Kind : uint8_t { kConnected, kFailed, kAccepted, kLost, kReceived };
    Kind kind = Kind::kLost;
    ConnectionId connection = 0;
    bool is_refused = false;  // kFailed: the host answered that no process listens at the address
    Message message{};        // kReceived
  };

  struct Options {
    LinkIdentity identity;
    std::vector<std::unique_ptr<os::Listener>> listeners;
    size_t num_agents = 1;  // so many may connect at one time, and a few strangers
  };
  // `wake_up` is notified when a connection was opened and advance() must be called.
  AgentLinks(os::System& system, Options options, os::Event& wake_up, LogSink& log);

  // Begins to open a connection to the agent at HOST:PORT.
  void connect(ConnectionId connection, const std::string& address, Deadline deadline);
  // Queues a message. A connection that has ended ignores it.
  void send(ConnectionId connection, const Message& message);
  // Ends a connection. No event follows.
  void close(ConnectionId connection);
  // Accepts, connects, sends and receives as far as possible without blocking.
  std::vector<Event> advance();
  void add_interests(std::vector<os::PollItem>& items) const;
  Deadline next_deadline(Deadline deadline) const { return callers_.next_deadline(deadline); }
  // Sends what is queued.
  void flush(Deadline deadline);
  // Returns the numeric addresses of the hosts whose agents are connected.
  std::vector<std::string> peer_hosts() const;

 private:
  struct Dial {
    std::string address;
    Deadline deadline;
    std::unique_ptr<BackgroundConnect> attempt;
    std::optional<Handshake> handshake{};
    bool is_dropped = false;
    TimePoint called_at{};  // when the handshake began
  };
  struct Link {
    std::unique_ptr<os::Socket> socket;
    wire::StreamBuffer incoming{};
    wire::StreamBuffer outgoing{};
  };

  void accept(std::vector<Event>& events);
  void advance_dials(std::vector<Event>& events);
  // Returns the event that ends the dial; nullopt while it is in progress.
  std::optional<Event> step(ConnectionId connection, Dial& dial);
  void open(ConnectionId connection, std::unique_ptr<os::Socket> socket);
  Status receive(ConnectionId connection, Link& link, std::vector<Event>& events);
  Status parse(ConnectionId connection, Link& link, std::vector<Event>& events);
  static Status transmit(Link& link);
  void log(LogLevel level, std::string_view text) { log_.write(level, "agent", text); }

  os::System& system_;
  const LinkIdentity identity_;
  const std::vector<std::unique_ptr<os::Listener>> listeners_;
  os::Event& wake_up_;
  LogSink& log_;
  Callers callers_;
  std::map<ConnectionId, Dial> dials_;
  std::map<ConnectionId, Link> links_;
  ConnectionId next_accepted_ = 1;
  // The encoding of the message that was sent last, because a coordinator sends one table to all.
  std::shared_ptr<const Table> last_table_;
  std::vector<std::byte> last_bytes_;
};

}  // namespace cadre::launch
