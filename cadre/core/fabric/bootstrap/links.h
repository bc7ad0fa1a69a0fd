// The control connections that a rank opens and accepts while the fabric connects. Sends and
// receives over them until the control plane becomes their owner.
//
// Threads: one. Blocking: await() and the methods that send or receive, until the deadline.
// Lifetime: borrows everything in its Context; owns the sockets until take().
// Errors: kTimeout and kPeerLost, which name the peer; the errors of the BootstrapWatch.
// Every wait also advances all other connections. So there is no deadlock, in whatever order ranks
// wait for each other, and no foreign process can delay the ranks. If a rank completes a second
// handshake, it has lost its first connection, and the second one replaces it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/fabric/bootstrap/callers.h"
#include "cadre/core/fabric/bootstrap/dial.h"
#include "cadre/core/fabric/bootstrap/handshake.h"
#include "cadre/core/fabric/bootstrap/watch.h"
#include "cadre/core/os/system.h"

namespace cadre {

class Links {
 public:
  struct Context {
    os::System& system;
    const LinkIdentity& identity;
    BootstrapWatch& watch;
    std::vector<os::Listener*> listeners;
    const wire::RankAddress& rank_address;  // the address of this rank
    std::string store_host;
    int num_ranks = 0;
  };
  Links(Context context, Deadline deadline);

  // Makes this rank dial the peer until they are connected; failed attempts are repeated. REQUIRES:
  // `rank_address` stays valid until they are connected.
  void call(int peer, const wire::RankAddress& rank_address);
  // Sets the greeting: the first bytes that are sent to each of these peers once it is connected.
  // The bytes are borrowed.
  void greet_with(ConstBytes greeting, std::span<const int> peers);
  // Waits until there is a connection to each of these peers, and all greetings were sent.
  Status await(std::span<const int> peers, const std::function<std::string(int)>& describe);

  // The peer with which bytes are exchanged, and a description of the exchange for error messages.
  struct Exchange {
    int peer = 0;
    std::string_view what;  // for example "waiting for the layout"
  };
  // These methods send or receive all of the bytes. REQUIRES: there is a connection to the peer.
  Status send(const Exchange& exchange, ConstBytes bytes);
  Status receive(const Exchange& exchange, Bytes bytes);
  Status send_byte(const Exchange& exchange, bool value);
  Result<bool> receive_byte(const Exchange& exchange);
  Status send_segment(const Exchange& exchange, const os::SharedMemory& segment);
  Result<std::shared_ptr<os::SharedMemory>> receive_segment(const Exchange& exchange);

  // Ends the accepting of connections. Ranks that connect later stay in the queues of the
  // listeners.
  void stop_accepting() { callers_.stop_accepting(); }

  bool is_unix(int peer) const;
  std::vector<std::unique_ptr<os::Socket>> take() { return std::move(sockets_); }

 private:
  // A connection that this rank opens. `handshake` is nullopt before the connection is opened.
  struct Call {
    int peer = 0;
    const wire::RankAddress* rank_address = nullptr;
    TimePoint not_before{};
    std::optional<Handshake> handshake{};
  };

  // Advances all connections as far as possible without blocking.
  Status advance();
  Status step(Call& call);
  Result<bool> dial_next();
  void place(Handshake& handshake);
  Status greet();
  bool has_greeted_all() const;
  // Waits until the item or an unfinished connection is ready. Returns false at the deadline.
  Result<bool> wait(std::optional<os::PollItem> item);
  // Calls `attempt` with the connection of a peer until it returns true.
  Status repeat(const Exchange& exchange, bool is_sending,
                const std::function<Result<bool>(os::Socket&)>& attempt);

  Context context_;
  const Deadline deadline_;
  Callers callers_;
  std::vector<Call> calls_;
  std::vector<std::unique_ptr<os::Socket>> sockets_;  // sockets_[r] is the connection to rank r
  ConstBytes greeting_;
  // The number of bytes that were sent to each peer that is greeted; the key is the rank.
  std::map<int, size_t> greeted_;
};

}  // namespace cadre
