#include "cadre/os/io/connect.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <optional>

#include "cadre/base/format.h"
#include "cadre/os/host/monotonic_clock.h"
#include "cadre/os/io/errno_error.h"
#include "cadre/os/io/poll.h"
#include "cadre/os/io/socket_address.h"

namespace cadre::os {
namespace {

constexpr int kBacklog = 1024;  // the kernel lowers it to net.core.somaxconn
constexpr Duration kFullBacklogPause = std::chrono::milliseconds(1);

Fd open_stream(int family) {
  return Fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// Waits until the connection is made or has failed; its errno, 0 for success, none at the deadline.
std::optional<int> finish_connect(int fd, Deadline deadline) {
  if (!poll_one(fd, POLLOUT, deadline)) return std::nullopt;
  int status = 0;
  socklen_t size = sizeof(status);
  ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &status, &size);
  return status;
}

std::optional<int> try_connect(int fd, const SocketAddress& target, Deadline deadline) {
  for (;;) {
    if (::connect(fd, target.get(), target.size) == 0) return 0;
    if (errno == EINPROGRESS || errno == EINTR) return finish_connect(fd, deadline);
    // A unix listener whose backlog is full says EAGAIN, and there is nothing to poll for.
    if (errno != EAGAIN) return errno;
    const TimePoint now = monotonic_now();
    if (deadline.has_passed(now)) return std::nullopt;
    sleep_until(Deadline(now + kFullBacklogPause).earlier(deadline));
  }
}

// Connecting to a free port of this host's ephemeral range may connect the socket to itself
// (TCP's simultaneous open).
bool is_connected_to_itself(int fd) {
  const Address local = local_address_of(fd);
  return local.kind == Address::Kind::kTcp && local == peer_address_of(fd);
}

}  // namespace

Result<Fd> open_listener(const Address& address) {
  auto targets = resolve(address);
  if (!targets.ok()) return targets.error();
  const SocketAddress& target = targets->front();
  const std::string what = cadre::format("listen on {}", address.to_string());
  Fd fd = open_stream(target.family());
  if (!fd.is_open()) return errno_error(ErrorCode::kUnavailable, what, errno);
  const int on = 1;
  // Connections of a server that has ended must not keep its successor from the port.
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(fd.get(), target.get(), target.size) != 0) {
    const ErrorCode code =
        errno == EADDRINUSE ? ErrorCode::kUnavailable : ErrorCode::kInvalidArgument;
    return errno_error(code, what, errno);
  }
  if (::listen(fd.get(), kBacklog) != 0) {
    return errno_error(ErrorCode::kUnavailable, what, errno);
  }
  return fd;
}

Result<Fd> connect_socket(const Address& address, Deadline deadline) {
  auto targets = resolve(address);
  if (!targets.ok()) return targets.error();
  const std::string what = cadre::format("connect to {}", address.to_string());
  Error last(ErrorCode::kUnavailable, what + ": the host has no address");
  for (const SocketAddress& target : *targets) {
    Fd fd = open_stream(target.family());
    if (!fd.is_open()) return errno_error(ErrorCode::kUnavailable, what, errno);
    const std::optional<int> status = try_connect(fd.get(), target, deadline);
    if (!status) return Error(ErrorCode::kTimeout, what + ": no answer before the deadline");
    if (*status != 0) {
      last = errno_error(ErrorCode::kUnavailable, what, *status);
    } else if (is_connected_to_itself(fd.get())) {
      last = errno_error(ErrorCode::kUnavailable, what, ECONNREFUSED);
    } else {
      return fd;
    }
  }
  return last;
}

}  // namespace cadre::os
