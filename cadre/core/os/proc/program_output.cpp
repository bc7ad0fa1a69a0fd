#include "cadre/core/os/proc/program_output.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/native/monotonic_clock.h"
#include "cadre/core/os/proc/exit_status.h"

namespace cadre::os {
namespace {

constexpr size_t kMaxOutputBytes = size_t{1} << 20;

Error not_ended(const std::string& program) {
  return Error(ErrorCode::kTimeout,
               cadre::format("{} did not end in time and was killed", program));
}

// Waits until the program ends; returns false at the deadline. Polls with waitid(), because on some
// hosts a process can get no pidfd; few polls are needed, because nearly every program ends as soon
// as it has closed its output. Does not reap the child, so that reap() gets its exit code. A child
// that was reaped elsewhere counts as ended.
bool ends_until(pid_t pid, Deadline deadline) {
  constexpr int kNapMilliseconds = 1;
  while (true) {
    siginfo_t info = {};
    const int found = ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT);
    if (found == 0 && info.si_pid == pid) return true;
    if (found < 0 && errno == ECHILD) return true;
    if (deadline.has_passed(monotonic_now())) return false;
    ::poll(nullptr, 0, kNapMilliseconds);
  }
}

// Reads until the program closes its output. The error says why reading ended before that.
Result<std::string> read_to_end(int fd, const std::string& program, Deadline deadline) {
  std::string output;
  std::array<char, 4096> chunk;
  while (output.size() <= kMaxOutputBytes) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining(monotonic_now()));
    pollfd item = {.fd = fd, .events = POLLIN, .revents = 0};
    const int ready = ::poll(&item, 1, static_cast<int>(left.count()));
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) {
      return not_ended(program);
    }
    const ssize_t received = ::read(fd, chunk.data(), chunk.size());
    if (received < 0 && errno == EINTR) continue;
    if (received < 0) {
      return errno_error(ErrorCode::kUnavailable, cadre::format("read from {}", program), errno);
    }
    if (received == 0) return output;
    output.append(chunk.data(), static_cast<size_t>(received));
  }
  return Error(ErrorCode::kUnavailable,
               cadre::format("{} printed more than {} bytes", program, kMaxOutputBytes));
}

std::string ending_of(const std::string& program, const ExitStatus& status) {
  if (!status.is_known) {
    return cadre::format(
        "how {} ended is not known: this process ignores SIGCHLD, or another part of it "
        "reaps all children; let SIGCHLD have its default, and wait for children by their pid",
        program);
  }
  if (status.signal != 0) return cadre::format("{} was ended by signal {}", program, status.signal);
  return cadre::format("{} ended with exit code {}", program, status.code);
}

Result<pid_t> spawn(const std::vector<std::string>& arguments, int output_fd) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawn_file_actions_adddup2(&actions, output_fd, STDOUT_FILENO);
  // The program gets an empty signal mask: signals that this process blocks must reach it.
  sigset_t none;
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  pid_t pid = 0;
  const int status = ::posix_spawnp(&pid, argv[0], &actions, &attributes, argv.data(), ::environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (status != 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("run {}", arguments[0]), status);
  }
  return pid;
}

}  // namespace

Result<std::string> program_output(const std::vector<std::string>& arguments, Deadline deadline) {
  std::array<int, 2> ends = {};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    return errno_error(ErrorCode::kUnavailable, "make a pipe", errno);
  }
  const Fd read_end(ends[0]);
  Fd write_end(ends[1]);
  const Result<pid_t> pid = spawn(arguments, write_end.get());
  if (!pid.ok()) return pid.error();
  write_end.close();  // only the program keeps the pipe open now

  Result<std::string> output = read_to_end(read_end.get(), arguments[0], deadline);
  // A program that has closed its output may still run.
  if (output.ok() && !ends_until(*pid, deadline)) output = not_ended(arguments[0]);
  if (!output.ok()) ::kill(*pid, SIGKILL);
  const ExitStatus status = reap(*pid);
  if (!output.ok() || status.is_success()) return output;
  return Error(ErrorCode::kUnavailable, ending_of(arguments[0], status));
}

}  // namespace cadre::os
