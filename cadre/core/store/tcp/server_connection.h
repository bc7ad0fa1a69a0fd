// A client's connection to a store server. It sends one request at a time and waits for the answer.
//
// Threads: one at a time. Blocking: dial() until its Deadline; call() for kCancelTime longer if the
// server does not answer. Lifetime: the System must outlive the connection. Errors: kPeerLost if
// the server is gone, kTimeout, kCorruption for an invalid answer, kInvalidArgument from the
// handshake.
// With Cadre's server, a request that reaches its deadline is cancelled, and the call waits for the
// answer to the cancellation. So the connection stays usable, and no queue item that the server has
// already sent is lost. A c10d server does not answer set, append or queue_push: a ping is sent
// after them, and its answer shows that they were executed. After a timeout a connection to a c10d
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

// The time that a request waits, beyond its deadline, for the server's answer to its cancellation,
// or for an item that the server has already removed from its queue.
inline constexpr Duration kCancelTime = std::chrono::milliseconds(500);

class ServerConnection {
 public:
  // Called by dial() only.
  ServerConnection(os::System& system, StoreProtocol protocol, std::unique_ptr<os::Socket> socket);

  Result<wire::StoreResponse> call(wire::StoreRequest request, Deadline deadline);
  // Returns false if the state of the stream is unknown, for example after a partly sent request.
  // The connection must then be closed.
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
  // Removes the first item of a queue and returns it. A queue_pop waits until there is an item; a
  // try_queue_pop does not wait.
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
  wire::Progress progress_;  // how much of the current answer was read
  uint32_t next_nonce_ = 0;
  bool is_usable_ = true;
};

// Connects and runs the handshake of the protocol. Tries again until the deadline if the server
// closes the connection during the handshake, as it does when it has too many connections without a
// proof.
Result<std::unique_ptr<ServerConnection>> dial(os::System& system, const TcpStoreOptions& options,
                                               Deadline deadline);

// Connects like dial(), for a client's first connection, and sets `route` to the addresses of its
// two ends. Any program may listen at the address. If its greeting is not that of a store, the
// error is kInvalidArgument. If it sends no byte within options.greeting_timeout, the error is a
// kTimeout which says that the program may be no store.
Result<std::unique_ptr<ServerConnection>> dial_first(os::System& system,
                                                     const TcpStoreOptions& options,
                                                     Deadline deadline, StoreRoute& route);

}  // namespace cadre::store
