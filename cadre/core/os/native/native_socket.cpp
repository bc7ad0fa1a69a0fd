#include "cadre/core/os/native/native_socket.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ratio>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/host/peer_user.h"
#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/io/socket_address.h"

namespace cadre::os {
namespace {

bool would_block(int error_number) {
  return error_number == EAGAIN || error_number == EWOULDBLOCK;
}

// The control part of a message that carries one descriptor. On 64-bit machines its padding has
// room for a second one, which a peer may send.
union FdControl {
  cmsghdr alignment;
  char bytes[CMSG_SPACE(sizeof(int))];
};

// One byte and a control part, for sendmsg or recvmsg. Not copied or moved, because the header
// points into the object.
struct FdMessage {
  FdMessage() {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control.bytes;
    header.msg_controllen = sizeof(control.bytes);
  }
  FdMessage(const FdMessage&) = delete;
  FdMessage& operator=(const FdMessage&) = delete;

  std::byte mark{0};
  iovec part{&mark, 1};
  msghdr header{};
  FdControl control{};  // is the last member, because it ends with an array of unknown length
};

// Returns all descriptors in a received message, however many, each owned by an Fd.
std::vector<Fd> fds_in(msghdr& message) {
  std::vector<Fd> fds;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      fds.emplace_back(number);
    }
  }
  return fds;
}

void set_option(int fd, int level, int name, int64_t value) {
  const int number = static_cast<int>(value);
  // The call fails on unix sockets, which need no limit: their peers are on this host and cannot
  // fall silent.
  ::setsockopt(fd, level, name, &number, sizeof(number));
}

// Sets keep-alive probes: the kernel sends the first to an idle peer after a third of `limit`, and
// up to four in all.
void keep_alive(int fd, Duration limit) {
  constexpr int64_t kNumQuestions = 4;
  const int64_t limit_s = std::chrono::duration_cast<std::chrono::seconds>(limit).count();
  const int64_t idle_s = std::max<int64_t>(1, limit_s / 3);
  const int64_t interval_s = std::max<int64_t>(1, (limit_s - idle_s) / kNumQuestions);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle_s);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, interval_s);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, std::min(kNumQuestions, limit_s - idle_s));
}

// Parts of up to this total size are copied together before they are sent, because one copy costs
// less than the kernel's work for several parts: 4 KiB of payload and the headers in front of it.
constexpr size_t kFewBytes = 4096 + 64;

// The parts that are not empty, as the iovec array that sendmsg() and recvmsg() take.
class IoParts {
 public:
  template <typename Part>
  explicit IoParts(std::span<const Part> parts) {
    size_t count = 0;
    for (const Part& part : parts.first(std::min(parts.size(), Socket::kMaxParts))) {
      if (part.empty()) continue;
      // The kernel only reads what is sent, but its type has no const.
      parts_[count++] = {const_cast<std::byte*>(part.data()), part.size()};
      size_ += part.size();
    }
    message_.msg_iov = parts_.data();
    message_.msg_iovlen = count;
  }
  IoParts(const IoParts&) = delete;
  IoParts& operator=(const IoParts&) = delete;

  size_t size() const { return size_; }
  msghdr& message() { return message_; }
  const msghdr& message() const { return message_; }

 private:
  std::array<iovec, Socket::kMaxParts> parts_;  // only the first msg_iovlen are set
  msghdr message_{};
  size_t size_ = 0;
};

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
  if (peer_.kind != Address::Kind::kTcp) return;
  // Small messages must not wait for the acknowledgement of earlier ones.
  set_option(fd_.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  keep_alive(fd_.get(), kMaxPeerSilence);
}

void NativeSocket::limit_silence(Duration limit) {
  if (peer_.kind != Address::Kind::kTcp || !fd_.is_own()) return;
  const auto limit_ms = std::chrono::duration_cast<std::chrono::milliseconds>(limit).count();
  keep_alive(fd_.get(), limit);
  set_option(fd_.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, limit_ms);
}

Status NativeSocket::check_peer_user() const {
  return require_own_user(peer_user_of(fd_.get()));
}

Result<size_t> NativeSocket::try_send(ConstBytes data) {
  if (data.empty()) return size_t{0};
  CADRE_RETURN_IF_ERROR(check_own());
  const ssize_t sent = retry_interrupted(
      [&] { return ::send(fd_.get(), data.data(), data.size(), MSG_NOSIGNAL | MSG_DONTWAIT); });
  return sent_or_lost(sent);
}

Result<size_t> NativeSocket::try_recv(Bytes buffer) {
  if (buffer.empty()) return size_t{0};
  CADRE_RETURN_IF_ERROR(check_own());
  const ssize_t received = retry_interrupted(
      [&] { return ::recv(fd_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT); });
  return received_or_lost(received);
}

Result<size_t> NativeSocket::try_send_parts(std::span<const ConstBytes> parts) {
  const IoParts io(parts);
  if (io.size() == 0) return size_t{0};
  std::array<std::byte, kFewBytes> joined;
  if (io.size() <= joined.size()) {
    std::byte* end = joined.data();
    for (const ConstBytes part : parts.first(std::min(parts.size(), kMaxParts))) {
      if (!part.empty()) std::memcpy(end, part.data(), part.size());
      end += part.size();
    }
    return try_send(ConstBytes(joined).first(io.size()));
  }
  CADRE_RETURN_IF_ERROR(check_own());
  const ssize_t sent = retry_interrupted(
      [&] { return ::sendmsg(fd_.get(), &io.message(), MSG_NOSIGNAL | MSG_DONTWAIT); });
  return sent_or_lost(sent);
}

Result<size_t> NativeSocket::try_recv_parts(std::span<const Bytes> parts) {
  IoParts io(parts);
  if (io.size() == 0) return size_t{0};
  CADRE_RETURN_IF_ERROR(check_own());
  const ssize_t received =
      retry_interrupted([&] { return ::recvmsg(fd_.get(), &io.message(), MSG_DONTWAIT); });
  return received_or_lost(received);
}

size_t NativeSocket::num_unsent() const {
  int num_bytes = 0;
  // The call fails on unix sockets, on which sent bytes are at the other end at once.
  if (::ioctl(fd_.get(), SIOCOUTQNSD, &num_bytes) != 0) return 0;
  return static_cast<size_t>(std::max(num_bytes, 0));
}

Result<size_t> NativeSocket::sent_or_lost(ssize_t sent) const {
  if (sent >= 0) return static_cast<size_t>(sent);
  if (would_block(errno)) return size_t{0};
  return lost(errno);
}

Result<size_t> NativeSocket::received_or_lost(ssize_t received) const {
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
  CADRE_RETURN_IF_ERROR(check_own());
  CADRE_RETURN_IF_ERROR(native->check("send a shared segment"));
  const int number = native->fd();
  FdMessage message;
  const msghdr& header = message.header;
  cmsghdr* control = CMSG_FIRSTHDR(&header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(control), &number, sizeof(number));
  const ssize_t sent =
      retry_interrupted([&] { return ::sendmsg(fd_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT); });
  if (sent >= 0) return true;
  if (would_block(errno)) return false;
  return lost(errno);
}

Result<std::unique_ptr<SharedMemory>> NativeSocket::try_recv_segment() {
  CADRE_RETURN_IF_ERROR(require_unix());
  CADRE_RETURN_IF_ERROR(check_own());
  FdMessage message;
  msghdr& header = message.header;
  const ssize_t received = retry_interrupted(
      [&] { return ::recvmsg(fd_.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC); });
  if (received == 0) return ended();
  if (received < 0 && would_block(errno)) return std::unique_ptr<SharedMemory>();
  if (received < 0) return lost(errno);
  std::vector<Fd> fds = fds_in(header);
  if ((header.msg_flags & MSG_CTRUNC) != 0 && fds.empty()) {
    return Error(ErrorCode::kUnavailable,
                 cadre::format("receive a segment from {}: this process has no descriptor left for "
                               "it; raise ulimit -n",
                               peer_.to_string()));
  }
  if (fds.size() != 1 || (header.msg_flags & MSG_CTRUNC) != 0) {
    return Error(ErrorCode::kCorruption,
                 cadre::format(
                     "receive a segment from {}: the next byte carries {} descriptors, expected 1; "
                     "the two ends are out of step, check that both run the same version",
                     peer_.to_string(), fds.size()));
  }
  return segments_.adopt(std::move(fds.front()));
}

void NativeSocket::shutdown() {
  was_shut_down_.store(true, std::memory_order_relaxed);
  if (fd_.is_own()) ::shutdown(fd_.get(), SHUT_RDWR);
}

Error NativeSocket::lost(int error_number) const {
  if (was_shut_down_.load(std::memory_order_relaxed)) return ended();
  if (error_number == EBADF || error_number == ENOTSOCK) return closed_here();
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

// If the descriptor was closed from outside (fd.h) and its number belongs to a socket of the
// program now, bytes would go to that socket's peer, or come from it. (For a file that is no socket
// the call fails.) The check costs a fifth of a short send, so it is made once in each tick of the
// kernel's clock, a few milliseconds.
Status NativeSocket::check_own() const {
  timespec tick{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &tick);
  const int64_t now = int64_t{tick.tv_sec} * std::nano::den + tick.tv_nsec;
  if (checked_at_.load(std::memory_order_relaxed) == now) return {};
  if (!fd_.is_own()) return closed_here();
  checked_at_.store(now, std::memory_order_relaxed);
  return {};
}

Error NativeSocket::closed_here() const {
  return closed_from_outside(
      cadre::format("connection from {} to {}", local_.to_string(), peer_.to_string()), fd_.get());
}

Status NativeSocket::require_unix() const {
  if (local_.kind == Address::Kind::kUnix) return {};
  return Error(
      ErrorCode::kInvalidArgument,
      cadre::format("cannot pass a shared-memory segment over {}: only unix sockets carry one",
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
    Result<std::unique_ptr<Socket>> accepted = try_accept_at(fd);
    if (!accepted.ok() || *accepted != nullptr) return accepted;
  }
  return std::unique_ptr<Socket>();
}

Result<std::unique_ptr<Socket>> NativeListener::try_accept_at(const Fd& fd) {
  if (!fd.is_own()) {
    return closed_from_outside(cadre::format("accept on {}", address_.to_string()), fd.get());
  }
  Fd accepted(static_cast<int>(retry_interrupted([&]() -> ssize_t {
    return ::accept4(fd.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  })));
  if (accepted.is_open()) {
    return std::unique_ptr<Socket>(std::make_unique<NativeSocket>(std::move(accepted), segments_));
  }
  // A connection that was reset before it was accepted is no error of the listener.
  if (would_block(errno) || errno == ECONNABORTED) return std::unique_ptr<Socket>();
  return errno_error(ErrorCode::kUnavailable, cadre::format("accept on {}", address_.to_string()),
                     errno);
}

}  // namespace cadre::os
