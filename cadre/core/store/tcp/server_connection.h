// A client's connection to a store server: sends one request and waits for its answer.
//
// Threads: one at a time. Blocking: dial, until its Deadline; call, for kCancelTime longer where
// the server does not answer. Lifetime: the System outlives it. Errors: kPeerLost when the server
// is gone, kTimeout, kCorruption for an answer that makes no sense, kInvalidArgument from the
// handshake.
// With Cadre's server a request that reaches its deadline is cancelled, and the answer to that is
// waited for, so that the connection stays usable and nothing that the server has given away is
// lost. c10d's server answers in the same order, but neither set nor append nor a push: a ping
// behind them tells that they were carried out; and after a timeout the connection is not usable.
// Format: docs/formats/store-tcp.md.
#pragma once

#include <chrono>
#include <memory>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/tcp/tcp_store.h"
#include "cadre/core/wire/store/store_message.h"
#include "cadre/core/wire/stream_buffer.h"

namespace cadre::store {

// How long after its deadline a request waits for the server's answer to its cancellation, and for
// an item that the server has taken out of its queue.
inline constexpr Duration kCancelTime = std::chrono::milliseconds(500);

class ServerConnection {
 public:
  // Use dial().
  ServerConnection(os::System& system, StoreProtocol protocol, std::unique_ptr<os::Socket> socket);

  Result<wire::StoreResponse> call(wire::StoreRequest request, Deadline deadline);
  // False once the stream can no longer be trusted: the connection must be thrown away.
  bool is_usable() const { return is_usable_; }
  // The first request and its answer: the handshake of the protocol.
  Status greet(const os::Secret& token, Deadline deadline);

 private:
  bool is_c10d() const { return protocol_ == StoreProtocol::kC10d; }
  Status validate(Deadline deadline);
  Status prove(const os::Secret& token, Deadline deadline);
  Result<wire::StoreResponse> call_cadre(const wire::StoreRequest& request, Deadline deadline);
  Result<wire::StoreResponse> call_c10d(const wire::StoreRequest& request, Deadline deadline);
  Status await_keys(const wire::StoreRequest& request, Deadline deadline);
  // Takes the first item of a queue; for a queue_pop once there is one.
  Result<wire::StoreResponse> pop(const wire::StoreRequest& request, Deadline deadline);
  Result<wire::StoreResponse> list_keys(Deadline deadline);
  Result<wire::StoreResponse> ping(Deadline deadline);

  Result<wire::StoreResponse> exchange(const wire::StoreRequest& request, Deadline deadline);
  Status send(const wire::StoreRequest& request, Deadline deadline);
  Result<wire::StoreResponse> receive(const wire::StoreRequest& request, Deadline deadline);
  // Waits until at least one more byte is in the buffer.
  Status receive_more(Deadline deadline);

  os::System& system_;
  const StoreProtocol protocol_;
  std::unique_ptr<os::Socket> socket_;
  wire::StreamBuffer buffer_;
  wire::Progress progress_;  // of the answer that is awaited
  uint32_t next_nonce_ = 0;
  bool is_usable_ = true;
};

// Connects once and runs the handshake of the protocol.
Result<std::unique_ptr<ServerConnection>> dial(os::System& system, const TcpStoreOptions& options,
                                               Deadline deadline);

// The same for a client's first connection, which learns its two ends. What listens there may be
// anything: kInvalidArgument says so when it greets as no store does; kTimeout doubts it when
// nothing comes within options.greeting_timeout.
Result<std::unique_ptr<ServerConnection>> dial_first(os::System& system,
                                                     const TcpStoreOptions& options,
                                                     Deadline deadline, StoreRoute& route);

}  // namespace cadre::store
