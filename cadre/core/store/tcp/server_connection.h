// A client's connection to a store server: sends one request and waits for its answer.
//
// Threads: one at a time. Blocking: dial, until its Deadline; call, for kCancelTime longer where
// the server does not answer. Lifetime: the System outlives it. Errors: kPeerLost when the server
// is gone, kTimeout, kCorruption for an answer that makes no sense, kInvalidArgument from the
// handshake. Every protocol takes the native request and gives the native response, so TcpStore
// knows one.
#pragma once

#include <chrono>
#include <memory>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/tcp/tcp_store.h"
#include "cadre/core/wire/framing.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre::store {

// How long after its deadline a request waits for the server's answer to its cancellation, and for
// an item that the server has taken out of its queue.
inline constexpr Duration kCancelTime = std::chrono::milliseconds(500);

class ServerConnection {
 public:
  virtual ~ServerConnection() = default;
  // `request.id` is set by the connection.
  virtual Result<wire::StoreResponse> call(wire::StoreRequest request, Deadline deadline) = 0;
  // False once the stream can no longer be trusted: the connection must be thrown away.
  virtual bool is_usable() const = 0;
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

// A socket that is written and read with deadlines.
class BlockingStream {
 public:
  BlockingStream(os::System& system, std::unique_ptr<os::Socket> socket)
      : system_(system), socket_(std::move(socket)) {}

  Status send(ConstBytes data, Deadline deadline);
  // Waits until at least one more byte is in the buffer.
  Status receive_more(Deadline deadline);
  wire::StreamBuffer& buffer() { return buffer_; }
  Deadline deadline_in(Duration budget) { return system_.deadline_in(budget); }

 private:
  os::System& system_;
  std::unique_ptr<os::Socket> socket_;
  wire::StreamBuffer buffer_;
};

}  // namespace cadre::store
