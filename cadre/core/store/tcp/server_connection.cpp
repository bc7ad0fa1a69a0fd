#include "cadre/core/store/tcp/server_connection.h"

#include <array>
#include <span>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/store/tcp/c10d_connection.h"
#include "cadre/core/store/tcp/native_connection.h"

namespace cadre::store {
namespace {

Result<std::unique_ptr<ServerConnection>> greet(os::System& system, const TcpStoreOptions& options,
                                                std::unique_ptr<os::Socket> socket,
                                                Deadline deadline) {
  BlockingStream stream(system, std::move(socket));
  if (options.protocol == StoreProtocol::kC10d) {
    return C10dConnection::open(system, std::move(stream), deadline);
  }
  return NativeConnection::open(system, std::move(stream), options.token, deadline);
}

}  // namespace

Result<std::unique_ptr<ServerConnection>> dial(os::System& system, const TcpStoreOptions& options,
                                               Deadline deadline) {
  Result<std::unique_ptr<os::Socket>> socket = system.connect(options.address, deadline);
  if (!socket.ok()) return socket.error();
  return greet(system, options, std::move(socket).value(), deadline);
}

Result<std::unique_ptr<ServerConnection>> dial_first(os::System& system,
                                                     const TcpStoreOptions& options,
                                                     Deadline deadline, StoreRoute& route) {
  Result<std::unique_ptr<os::Socket>> socket = system.connect(options.address, deadline);
  if (!socket.ok()) return socket.error();
  route = {(*socket)->local_address(), (*socket)->peer_address()};
  auto connection = greet(system, options, std::move(socket).value(),
                          deadline.earlier(system.deadline_in(options.greeting_timeout)));
  if (connection.ok()) return connection;
  const std::string_view store = options.protocol == StoreProtocol::kC10d ? "c10d" : "Cadre";
  constexpr std::string_view kRemedy = "choose another MASTER_PORT, the same on all ranks";
  const Error& error = connection.error();
  if (error.code() == ErrorCode::kCorruption) {
    return Error(ErrorCode::kInvalidArgument, format("what listens there is no {} store: {}; {}",
                                                     store, error.message(), kRemedy));
  }
  // It may be a store whose host is overloaded.
  if (error.code() == ErrorCode::kTimeout) {
    return Error(ErrorCode::kTimeout,
                 format("what listens there took the connection and said nothing: if it is no {} "
                        "store, {}",
                        store, kRemedy));
  }
  return error;
}

Status BlockingStream::send(ConstBytes data, Deadline deadline) {
  while (!data.empty()) {
    const Result<size_t> sent = socket_->try_send(data);
    if (!sent.ok()) return sent.error();
    data = data.subspan(*sent);
    if (*sent > 0) continue;
    os::PollItem item{.target = socket_.get(), .want_write = true};
    if (!system_.poll(std::span(&item, 1), deadline)) {
      return Error(ErrorCode::kTimeout, "the store server did not take a request in time");
    }
  }
  return {};
}

Status BlockingStream::receive_more(Deadline deadline) {
  constexpr size_t kChunkBytes = 64 << 10;
  std::array<std::byte, kChunkBytes> chunk;
  while (true) {
    const Result<size_t> received = socket_->try_recv(chunk);
    if (!received.ok()) return received.error();
    if (*received > 0) {
      buffer_.append(ConstBytes(chunk).first(*received));
      return {};
    }
    os::PollItem item{.target = socket_.get(), .want_read = true};
    if (!system_.poll(std::span(&item, 1), deadline)) {
      return Error(ErrorCode::kTimeout, "the store server did not answer in time");
    }
  }
}

}  // namespace cadre::store
