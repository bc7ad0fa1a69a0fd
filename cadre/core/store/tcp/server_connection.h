// A client's connection to a store server: sends one request and waits for its answer.
//
// Threads: one at a time. Blocking: dial() until its Deadline; call() for kCancelTime longer if the
// server does not answer. Lifetime: the System must outlive the connection. Errors: kPeerLost if
// the server is gone, kTimeout, kCorruption for an invalid answer, kInvalidArgument from the
// handshake.
// With Cadre's server, a request that reaches its deadline is cancelled, and the call waits for the
// answer to the cancellation. So the connection stays usable, and nothing that the server has
// handed out is lost. c10d's server answers in order, too, but does not answer set, append or a
// push: a ping after them shows that they were carried out. After a timeout a connection to c10d's
// server is not usable. Format: docs/formats/store-tcp.md.
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

// After its deadline, a request waits for this time for the server's answer to its cancellation, or
// for an item that the server has taken out of its queue.
inline constexpr Duration kCancelTime = std::chrono::milliseconds(500);

class ServerConnection {
 public:
  // Only dial() calls it.
  ServerConnection(os::System& system, StoreProtocol protocol, std::unique_ptr<os::Socket> socket);

  Result<wire::StoreResponse> call(wire::StoreRequest request, Deadline deadline);
  // Returns false if the stream can no longer be trusted; the connection must then be dropped.
  bool is_usable() const { return is_usable_; }
  // Sends the first request and receives its answer: the handshake of the protocol.
  Status greet(const os::Secret& token, Deadline deadline);

 private:
  bool is_c10d() const { return protocol_ == StoreProtocol::kC10d; }
  Status validate(Deadline deadline);
  Status prove(const os::Secret& token, Deadline deadline);
  Result<wire::StoreResponse> call_cadre(const wire::StoreRequest& request, Deadline deadline);
  Result<wire::StoreResponse> call_c10d(const wire::StoreRequest& request, Deadline deadline);
  Status await_keys(const wire::StoreRequest& request, Deadline deadline);
  // Takes the first item of a queue; a queue_pop waits until there is one.
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
  wire::Progress progress_;  // says how much of the awaited answer was read
  uint32_t next_nonce_ = 0;
  bool is_usable_ = true;
};

// Connects and runs the handshake of the protocol. Tries again until the deadline if the server
// ends the connection during the handshake, as it does with the oldest of too many.
Result<std::unique_ptr<ServerConnection>> dial(os::System& system, const TcpStoreOptions& options,
                                               Deadline deadline);

// Does the same for a client's first connection and also returns the addresses of its two ends.
// What listens at the address may be any program: the error is kInvalidArgument if its greeting is
// not that of a store, and a kTimeout that says that it may be no store if nothing comes within
// options.greeting_timeout.
Result<std::unique_ptr<ServerConnection>> dial_first(os::System& system,
                                                     const TcpStoreOptions& options,
                                                     Deadline deadline, StoreRoute& route);

}  // namespace cadre::store
