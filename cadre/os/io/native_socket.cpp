#include "cadre/os/io/native_socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "cadre/base/format.h"
#include "cadre/os/io/errno_error.h"
#include "cadre/os/io/socket_address.h"

namespace cadre::os {
namespace {

bool would_block(int error_number) {
  return error_number == EAGAIN || error_number == EWOULDBLOCK;
}

// The control part of a message that carries one descriptor.
union FdMessage {
  cmsghdr alignment;
  char bytes[CMSG_SPACE(sizeof(int))];
};

// The descriptor in a received message; not open when it carries none.
Fd fd_in(msghdr& message) {
  const cmsghdr* part = CMSG_FIRSTHDR(&message);
  if (part == nullptr || part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS ||
      part->cmsg_len != CMSG_LEN(sizeof(int))) {
    return Fd();
  }
  int number = -1;
  std::memcpy(&number, CMSG_DATA(part), sizeof(number));
  return Fd(number);
}

template <typename Call>
ssize_t retry_interrupted(Call call) {
  ssize_t result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace

NativeSocket::NativeSocket(Fd fd, SegmentTable& segments)
    : fd_(std::move(fd)),
      segments_(segments),
      local_(local_address_of(fd_.get())),
      peer_(peer_address_of(fd_.get())) {
  const int on = 1;
  // Small messages must not wait for the acknowledgement of earlier ones. Fails on unix sockets,
  // which have no such delay.
  ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

Result<size_t> NativeSocket::try_send(ConstBytes data) {
  if (data.empty()) return size_t{0};
  const ssize_t sent = retry_interrupted(
      [&] { return ::send(fd_.get(), data.data(), data.size(), MSG_NOSIGNAL | MSG_DONTWAIT); });
  if (sent >= 0) return static_cast<size_t>(sent);
  if (would_block(errno)) return size_t{0};
  return lost(errno);
}

Result<size_t> NativeSocket::try_recv(Bytes buffer) {
  if (buffer.empty()) return size_t{0};
  const ssize_t received = retry_interrupted(
      [&] { return ::recv(fd_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT); });
  if (received > 0) return static_cast<size_t>(received);
  if (received == 0) return ended();
  if (would_block(errno)) return size_t{0};
  return lost(errno);
}

Result<bool> NativeSocket::try_send_segment(const SharedMemory& segment) {
  CADRE_RETURN_IF_ERROR(require_unix());
  const auto* native = dynamic_cast<const NativeSharedMemory*>(&segment);
  if (native == nullptr) {
    return Error(ErrorCode::kInvalidArgument,
                 "send a segment: it was made by another kind of System than this socket");
  }
  const int number = native->fd();
  std::byte mark{0};
  iovec part{&mark, 1};
  FdMessage control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &number, sizeof(number));
  const ssize_t sent = retry_interrupted(
      [&] { return ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT); });
  if (sent >= 0) return true;
  if (would_block(errno)) return false;
  return lost(errno);
}

Result<std::unique_ptr<SharedMemory>> NativeSocket::try_recv_segment() {
  CADRE_RETURN_IF_ERROR(require_unix());
  std::byte mark{0};
  iovec part{&mark, 1};
  FdMessage control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  const ssize_t received = retry_interrupted(
      [&] { return ::recvmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC); });
  if (received == 0) return ended();
  if (received < 0 && would_block(errno)) return std::unique_ptr<SharedMemory>();
  if (received < 0) return lost(errno);
  Fd fd = fd_in(message);
  if (!fd.is_open()) {
    return Error(
        ErrorCode::kCorruption,
        cadre::format("receive a segment from {}: the next byte carries none; the two ends "
                      "are out of step, check that both run the same version",
                      peer_.to_string()));
  }
  return segments_.adopt(std::move(fd));
}

void NativeSocket::shutdown() {
  was_shut_down_.store(true, std::memory_order_relaxed);
  ::shutdown(fd_.get(), SHUT_RDWR);
}

Error NativeSocket::lost(int error_number) const {
  if (was_shut_down_.load(std::memory_order_relaxed)) return ended();
  return errno_error(
      ErrorCode::kPeerLost,
      cadre::format("connection from {} to {} broke", local_.to_string(), peer_.to_string()),
      error_number);
}

Error NativeSocket::ended() const {
  const bool here = was_shut_down_.load(std::memory_order_relaxed);
  return Error(ErrorCode::kPeerLost,
               cadre::format("connection from {} to {} was ended by {} end", local_.to_string(),
                             peer_.to_string(), here ? "this" : "the other"));
}

Status NativeSocket::require_unix() const {
  if (local_.kind == Address::Kind::kUnix) return {};
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("pass a segment over {}: only unix sockets carry shared memory",
                             local_.to_string()));
}

NativeListener::NativeListener(std::vector<Fd> fds, SegmentTable& segments)
    : fds_(std::move(fds)), segments_(segments), address_(local_address_of(fds_[0].get())) {
  if (fds_.size() == 1) return;
  any_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  for (const Fd& fd : fds_) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (!any_.is_open() || ::epoll_ctl(any_.get(), EPOLL_CTL_ADD, fd.get(), &event) != 0) {
      throw errno_error(ErrorCode::kInternal, "epoll of several listeners", errno);
    }
  }
}

Result<std::unique_ptr<Socket>> NativeListener::try_accept() {
  for (const Fd& fd : fds_) {
    Result<std::unique_ptr<Socket>> accepted = try_accept_at(fd.get());
    if (!accepted.ok() || *accepted != nullptr) return accepted;
  }
  return std::unique_ptr<Socket>();
}

Result<std::unique_ptr<Socket>> NativeListener::try_accept_at(int number) {
  Fd accepted(static_cast<int>(retry_interrupted([&]() -> ssize_t {
    return ::accept4(number, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  })));
  if (accepted.is_open()) {
    return std::unique_ptr<Socket>(std::make_unique<NativeSocket>(std::move(accepted), segments_));
  }
  // A connection that was reset while it waited is the client's affair, not the listener's.
  if (would_block(errno) || errno == ECONNABORTED) return std::unique_ptr<Socket>();
  return errno_error(ErrorCode::kUnavailable, cadre::format("accept on {}", address_.to_string()),
                     errno);
}

}  // namespace cadre::os
