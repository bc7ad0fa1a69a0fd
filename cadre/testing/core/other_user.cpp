#include "cadre/testing/core/other_user.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/io/socket_address.h"

namespace cadre::testing {
namespace {

constexpr int kPatienceMs = 2000;
constexpr unsigned kChildSeconds = 5;

// The code of the child process. It was forked from a process with threads, so it makes only system
// calls.
[[noreturn]] void run_child(const os::SocketAddress& target, const std::string& bytes, int output) {
  ::alarm(kChildSeconds);
  // The system calls are made directly, because glibc's functions would signal the threads of the
  // parent, which do not exist in the child.
  ::syscall(SYS_setresgid, kOtherUser, kOtherUser, kOtherUser);
  if (::syscall(SYS_setresuid, kOtherUser, kOtherUser, kOtherUser) != 0) ::_exit(2);
  const int socket = ::socket(target.family(), SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::connect(socket, target.get(), target.size) != 0) ::_exit(3);
  if (::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) ::_exit(0);
  std::array<char, 4096> buffer;
  while (true) {
    pollfd item{socket, POLLIN, 0};
    if (::poll(&item, 1, kPatienceMs) <= 0) {
      constexpr std::string_view kKept = "(kept)";
      (void)!::write(output, kKept.data(), kKept.size());
      ::_exit(0);
    }
    const ssize_t received = ::recv(socket, buffer.data(), buffer.size(), 0);
    if (received <= 0) ::_exit(0);
    (void)!::write(output, buffer.data(), static_cast<size_t>(received));
  }
}

}  // namespace

std::string obstacle_to_other_user() {
  return ::geteuid() == 0 ? "" : "only root can become another user";
}

std::string talk_as_other_user(const os::Address& address, const std::string& bytes) {
  const os::SocketAddress target = os::resolve(address).value_or_throw().front();
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw os::errno_error(ErrorCode::kInternal, "make a pipe", errno);
  }
  const os::Fd input(ends[0]);
  os::Fd output(ends[1]);
  const pid_t child = ::fork();
  if (child < 0) throw os::errno_error(ErrorCode::kInternal, "fork", errno);
  if (child == 0) run_child(target, bytes, output.get());
  output.close();
  std::string heard;
  std::array<char, 4096> buffer;
  while (true) {
    const ssize_t got = ::read(input.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    heard.append(buffer.data(), static_cast<size_t>(got));
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    throw Error(ErrorCode::kInternal, "the other user's process could not connect");
  }
  return heard;
}

}  // namespace cadre::testing
