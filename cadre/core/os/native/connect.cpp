#include "cadre/core/os/native/connect.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <optional>

#include "cadre/core/base/format.h"
#include "cadre/core/os/host/descriptor_limit.h"
#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/io/interfaces.h"
#include "cadre/core/os/io/socket_address.h"
#include "cadre/core/os/native/monotonic_clock.h"
#include "cadre/core/os/native/poll.h"

namespace cadre::os {
namespace {

constexpr int kBacklog = 4096;  // the kernel lowers it to net.core.somaxconn
constexpr Duration kFullBacklogPause = std::chrono::milliseconds(1);

Fd open_stream(int family) {
  return Fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// Returns the error for a socket that this process could not make. `what` names the attempted
// action.
Error no_socket(std::string what, int error_number) {
  const bool is_own_limit = error_number == EMFILE || error_number == ENFILE ||
                            error_number == ENOBUFS || error_number == ENOMEM;
  if (error_number == EMFILE) {
    what += cadre::format(
        ": the limit of this process is {} open descriptors (RLIMIT_NOFILE), raise it with ulimit "
        "-n or keep fewer files and connections open",
        descriptor_limit().soft);
  } else if (error_number == ENFILE) {
    what += ": the machine has no descriptor left, raise fs.file-max";
  }
  return errno_error(ErrorCode::kUnavailable, what, error_number)
      .with_details({.is_own_limit = is_own_limit});
}

// Waits until the connection is made or has failed. Returns its errno, 0 for success, and nullopt
// at the deadline.
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
    // A unix listener whose backlog is full returns EAGAIN, and there is no event to poll for.
    if (errno != EAGAIN) return errno;
    const TimePoint now = monotonic_now();
    if (deadline.has_passed(now)) return std::nullopt;
    sleep_until(Deadline(now + kFullBacklogPause).earlier(deadline));
  }
}

// Returns whether the socket is connected to itself, which may happen in a connect() to a free port
// of this host's ephemeral range (TCP's simultaneous open).
bool is_connected_to_itself(int fd) {
  const Address local = local_address_of(fd);
  return local.kind == Address::Kind::kTcp && local == peer_address_of(fd);
}

Result<Fd> listen_at(const SocketAddress& target, const std::string& what) {
  Fd fd = open_stream(target.family());
  if (!fd.is_open()) {
    const bool is_short = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    return is_short ? no_socket(what, errno)
                    : errno_error(ErrorCode::kInvalidArgument, what, errno);
  }
  const int on = 1;
  // Old connections of a server that has ended (in TIME_WAIT) must not make bind() fail for the
  // next server on this port.
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

}  // namespace

Result<std::vector<Fd>> open_listeners(const Address& address) {
  auto targets = listening_addresses(address);
  if (!targets.ok()) return targets.error();
  std::vector<Fd> listeners;
  std::optional<Error> last;
  uint16_t port = address.port;
  for (SocketAddress& target : *targets) {
    Address here = to_address(target);
    here.port = port;
    // All listeners use the port that was chosen for the first one.
    const auto resolved = resolve(target.family() == AF_UNIX ? address : here);
    if (!resolved.ok()) return resolved.error();
    Result<Fd> fd = listen_at(resolved->front(), cadre::format("listen on {}", here.to_string()));
    if (fd.ok()) {
      port = local_address_of(fd->get()).port;
      listeners.push_back(std::move(fd).value());
    } else if (fd.error().code() == ErrorCode::kUnavailable) {
      return fd.error();
    } else {
      last = fd.error();  // a name may also resolve to an address that no interface has
    }
  }
  if (listeners.empty()) {
    return last
               ? *last
               : Error(ErrorCode::kUnavailable,
                       cadre::format("listen on {}: the host has no address", address.to_string()));
  }
  return listeners;
}

Result<Fd> connect_socket(const Address& address, Deadline deadline) {
  auto targets = resolve(address);
  if (!targets.ok()) return targets.error();
  Error last(ErrorCode::kUnavailable,
             cadre::format("connect to {}: the host has no address", address.to_string()));
  bool is_refused = true;  // all addresses so far have refused the connection
  for (size_t i = 0; i < targets->size(); ++i) {
    const SocketAddress& target = (*targets)[i];
    const auto what = [&] {
      return cadre::format("connect to {} {}",
                           (target.family() == AF_UNIX ? address : to_address(target)).to_string(),
                           describe_route_to(target));
    };
    Fd fd = open_stream(target.family());
    if (!fd.is_open()) return no_socket(cadre::format("connect to {}", address.to_string()), errno);
    // Each address gets a part of the time that is left, because an address that does not answer
    // must not use up the time of the host name's other addresses.
    const TimePoint now = monotonic_now();
    const auto num_left = static_cast<int64_t>(targets->size() - i);
    const Deadline share(now + deadline.remaining(now) / num_left);
    const std::optional<int> status = try_connect(fd.get(), target, share);
    is_refused = is_refused && status && (*status == ECONNREFUSED || *status == 0);
    if (!status) {
      last =
          errno_error(ErrorCode::kTimeout, what() + ": no answer before the deadline", ETIMEDOUT);
    } else if (*status != 0) {
      last = errno_error(ErrorCode::kUnavailable, what(), *status);
    } else if (is_connected_to_itself(fd.get())) {
      last = errno_error(ErrorCode::kUnavailable, what(), ECONNREFUSED);
    } else {
      return fd;
    }
  }
  return last.with_details({.is_refused = is_refused});
}

}  // namespace cadre::os
