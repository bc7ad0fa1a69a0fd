// One accepted connection of the store server: its socket, its buffers, and its session once the
// first byte has told whether it is that of a rank or of a c10d client.
//
// Threads: the server's. Blocking: never. Lifetime: ends its session's waits when destroyed.
// Errors: the reason to drop the client.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/os/socket.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/tcp/session.h"
#include "cadre/core/wire/challenge.h"

namespace cadre::store {

// What a connection needs from its server; all of it outlives the connection.
struct ServerContext {
  KeyTable& table;       // keys of ranks, which have proved the token
  KeyTable& c10d_table;  // keys of c10d clients, which cannot authenticate; the two are separate
  const os::Secret& token;
  bool serve_c10d;
  Duration silence_limit;
  os::System& system;
};

class ClientConnection {
 public:
  ClientConnection(const ServerContext& context, uint32_t number,
                   std::unique_ptr<os::Socket> socket, Deadline greeting_deadline);

  // What the poll should watch.
  os::PollItem interest() const;
  // Reads, answers and writes as far as it goes without waiting.
  Status on_ready(const os::PollItem& item);
  void on_ticket(KeyTable::Ticket ticket);
  // Sends what is buffered; called again by on_ready() when the socket was full.
  Status flush();

  bool is_accepted() const { return session_ && session_->is_accepted(); }
  bool has_greeted() const { return session_ && session_->has_greeted(); }
  Deadline greeting_deadline() const { return greeting_deadline_; }
  std::string peer() const { return socket_->peer_address().to_string(); }

 private:
  Status receive();
  Status serve();
  // Makes the session that the first byte asks for.
  Status make_session();

  const ServerContext& context_;
  TicketSource tickets_;
  std::unique_ptr<os::Socket> socket_;
  Deadline greeting_deadline_;
  wire::StreamBuffer in_;
  wire::StreamBuffer out_;
  std::optional<Session> session_;
};

bool is_loopback(const os::Address& address);

}  // namespace cadre::store
