#include "cadre/core/os/proc/fork/fork_request.h"

#include <sys/socket.h>
#include <sys/types.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {
namespace {

// The fixed part of a request. The numbers of the cores follow, as int32_t, and the texts of the
// environment, each with a zero byte at its end.
struct ForkRequestHeader {
  int32_t launcher_pid = 0;
  uint32_t num_bytes = 0;        // the size of the environment
  uint64_t ignored_signals = 0;  // bit n - 1 is set if signal n is ignored
  // The soft limits of the worker; kNoLimit means that the worker keeps the template's limit.
  uint64_t descriptors = 0;
  uint64_t stack_bytes = 0;
  uint32_t num_cores = 0;
  uint32_t reserved = 0;
};

constexpr uint64_t kNoLimit = ~uint64_t{0} - 1;
constexpr size_t kMaxEnvironmentBytes = size_t{64} << 20;
constexpr int32_t kMaxCores = 1 << 16;  // more than a kernel supports
constexpr size_t kNumStreams = 2;

Error connection_error(ssize_t num_bytes, std::string_view what) {
  if (num_bytes == 0) return Error(ErrorCode::kUnavailable, "the other process has ended");
  return errno_error(ErrorCode::kUnavailable, what, errno);
}

std::optional<uint64_t> limit_in(uint64_t value) {
  return value == kNoLimit ? std::nullopt : std::optional(value);
}

}  // namespace

ForkHello make_fork_hello() {
  ForkHello hello;
  static_assert(sizeof(CADRE_VERSION) <= sizeof(hello.build));
  std::memcpy(hello.build, CADRE_VERSION, sizeof(CADRE_VERSION));
  return hello;
}

bool is_of_this_build(const ForkHello& hello) {
  return std::memcmp(hello.build, make_fork_hello().build, sizeof(hello.build)) == 0;
}

Status send_bytes(int socket, const void* data, size_t num_bytes) {
  const char* next = static_cast<const char*>(data);
  while (num_bytes > 0) {
    const ssize_t sent = ::send(socket, next, num_bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return connection_error(sent, "send to a forked process");
    next += sent;
    num_bytes -= static_cast<size_t>(sent);
  }
  return {};
}

Status receive_bytes(int socket, void* data, size_t num_bytes) {
  char* next = static_cast<char*>(data);
  while (num_bytes > 0) {
    const ssize_t got = ::recv(socket, next, num_bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return connection_error(got, "receive from a forked process");
    next += got;
    num_bytes -= static_cast<size_t>(got);
  }
  return {};
}

Status send_fork_request(int socket, const ForkRequest& request, int output, int error) {
  std::string texts;
  for (const std::string& text : request.environment) texts.append(text).push_back('\0');
  ForkRequestHeader header{.launcher_pid = request.launcher_pid,
                           .num_bytes = static_cast<uint32_t>(texts.size()),
                           .descriptors = request.soft_limits.descriptors.value_or(kNoLimit),
                           .stack_bytes = request.soft_limits.stack_bytes.value_or(kNoLimit),
                           .num_cores = static_cast<uint32_t>(request.cores.size())};
  for (const int signal : request.ignored_signals) {
    header.ignored_signals |= uint64_t{1} << (signal - 1);
  }
  const std::array streams{output, error};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(streams))> control{};
  iovec bytes{.iov_base = &header, .iov_len = sizeof(header)};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(streams));
  std::memcpy(CMSG_DATA(rights), streams.data(), sizeof(streams));
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent != static_cast<ssize_t>(sizeof(header))) {
    return connection_error(sent, "send to a forked process");
  }
  const std::vector<int32_t> cores(request.cores.begin(), request.cores.end());
  CADRE_RETURN_IF_ERROR(send_bytes(socket, cores.data(), cores.size() * sizeof(int32_t)));
  return send_bytes(socket, texts.data(), texts.size());
}

Result<ReceivedForkRequest> receive_fork_request(int socket) {
  ForkRequestHeader header;
  std::array<int, kNumStreams> streams{};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(streams))> control{};
  iovec bytes{.iov_base = &header, .iov_len = sizeof(header)};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = 0;
  do {
    got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
  } while (got < 0 && errno == EINTR);
  if (got <= 0) return connection_error(got, "receive a request to fork");
  const cmsghdr* rights = CMSG_FIRSTHDR(&message);
  if (rights == nullptr || rights->cmsg_len != CMSG_LEN(sizeof(streams))) {
    return Error(ErrorCode::kUnavailable, "a request to fork does not carry two descriptors");
  }
  std::memcpy(streams.data(), CMSG_DATA(rights), sizeof(streams));
  ReceivedForkRequest received{.output = Fd(streams[0]), .error = Fd(streams[1])};
  if (got != static_cast<ssize_t>(sizeof(header)) || header.num_bytes > kMaxEnvironmentBytes ||
      header.num_cores > uint32_t{kMaxCores}) {
    return Error(ErrorCode::kUnavailable, "a request to fork is incomplete or too large");
  }
  received.request.launcher_pid = header.launcher_pid;
  for (int signal = 1; signal <= 64; ++signal) {
    if ((header.ignored_signals >> (signal - 1) & 1) != 0) {
      received.request.ignored_signals.push_back(signal);
    }
  }
  received.request.soft_limits = {.descriptors = limit_in(header.descriptors),
                                  .stack_bytes = limit_in(header.stack_bytes)};
  std::vector<int32_t> cores(header.num_cores);
  CADRE_RETURN_IF_ERROR(receive_bytes(socket, cores.data(), cores.size() * sizeof(int32_t)));
  if (std::ranges::any_of(cores, [](int32_t core) { return core < 0 || core >= kMaxCores; })) {
    return Error(ErrorCode::kUnavailable, "a request to fork names a core that cannot exist");
  }
  received.request.cores.assign(cores.begin(), cores.end());
  std::string texts(header.num_bytes, '\0');
  CADRE_RETURN_IF_ERROR(receive_bytes(socket, texts.data(), texts.size()));
  for (size_t begin = 0; begin < texts.size();) {
    const size_t end = texts.find('\0', begin);
    received.request.environment.push_back(texts.substr(begin, end - begin));
    begin = end == std::string::npos ? texts.size() : end + 1;
  }
  return received;
}

}  // namespace cadre::os
