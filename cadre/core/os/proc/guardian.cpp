#include "cadre/core/os/proc/guardian.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/native/monotonic_clock.h"
#include "cadre/core/os/native/poll.h"
#include "cadre/core/os/proc/descendants.h"
#include "cadre/core/os/proc/exit_status.h"
#include "cadre/core/os/proc/pipe.h"
#include "cadre/core/os/proc/signals.h"

namespace cadre::os {
namespace {

constexpr std::array kForwarded{SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP};
// The longest single wait: longer waits are repeated, because every wait has a deadline.
constexpr Duration kNap = std::chrono::minutes(1);
// The longest wait while the terminal is relayed: coming to the foreground is no event.
constexpr Duration kForegroundNap = std::chrono::seconds(1);
constexpr Duration kKillTimeout = std::chrono::seconds(5);

class PidFd final : public Pollable {
 public:
  explicit PidFd(int pid) : fd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {
    if (!fd_.is_open()) throw errno_error(ErrorCode::kUnavailable, "pidfd_open", errno);
  }
  int poll_handle() const override { return fd_.get(); }

 private:
  Fd fd_;
};

class Descriptor final : public Pollable {
 public:
  int poll_handle() const override { return fd_.get(); }
  void open(Fd fd) { fd_ = std::move(fd); }
  bool is_open() const { return fd_.is_open(); }
  void close() { fd_.close(); }

 private:
  Fd fd_;
};

class StandardInput final : public Pollable {
 public:
  int poll_handle() const override { return STDIN_FILENO; }
};

// Copies the input of the terminal to the pipe that is the supervisor's standard input. Does
// nothing unless open() was called.
class TerminalRelay {
 public:
  void open() {
    int ends[2] = {-1, -1};
    if (::pipe2(ends, O_CLOEXEC) != 0) throw errno_error(ErrorCode::kUnavailable, "pipe2", errno);
    reader_ = Fd(ends[0]);
    writer_.open(Fd(ends[1]));
    if (::fcntl(writer_.poll_handle(), F_SETFL, O_NONBLOCK) != 0) {
      throw errno_error(ErrorCode::kUnavailable, "make a pipe non-blocking", errno);
    }
  }
  // Called by the guardian, so that writes fail when the supervisor has ended.
  void close_reader() { reader_.close(); }
  // Called by the supervisor.
  void become_standard_input() {
    if (!reader_.is_open()) return;
    ::dup2(reader_.get(), STDIN_FILENO);
    reader_.close();
    writer_.close();
  }

  bool is_open() const { return writer_.is_open(); }
  bool has_pending() const { return is_open() && !pending_.empty(); }
  // A process in the background that reads from its controlling terminal would be stopped.
  // tcgetpgrp() fails for a terminal that does not control this process (setsid).
  bool wants_input() const {
    if (!is_open() || !pending_.empty()) return false;
    const pid_t foreground = ::tcgetpgrp(STDIN_FILENO);
    return foreground < 0 || foreground == ::getpgrp();
  }
  Pollable& source() { return source_; }
  Pollable& sink() { return writer_; }

  void read() {
    pending_.resize(kMaxBytes);
    const ssize_t got = ::read(STDIN_FILENO, pending_.data(), pending_.size());
    pending_.resize(got > 0 ? static_cast<size_t>(got) : 0);
    if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) writer_.close();
  }
  void write() {
    const ssize_t written = ::write(writer_.poll_handle(), pending_.data(), pending_.size());
    if (written >= 0) {
      pending_.erase(0, static_cast<size_t>(written));
    } else if (errno != EINTR && errno != EAGAIN) {
      writer_.close();
    }
  }

 private:
  static constexpr size_t kMaxBytes = 4096;

  StandardInput source_;
  Fd reader_;
  Descriptor writer_;
  std::string pending_;
};

// Kills and reaps until no child is left, or only those of another user, or the time is up: a
// process in an uninterruptible system call dies only when that call returns.
void kill_everything_below() {
  const Deadline deadline(monotonic_now() + kKillTimeout);
  while (has_children() && !deadline.has_passed(monotonic_now())) {
    const std::vector<Descendant> left = list_descendants();
    if (!left.empty() && std::ranges::none_of(left, may_signal)) return;
    signal_processes(left, SIGKILL);
    reap_orphans({});
    poll_items({}, Deadline(monotonic_now() + std::chrono::milliseconds(2)));
  }
}

// Stops this process as SIGTSTP would if it were not blocked. The kernel ignores the signal if no
// process could continue this one.
void stop_until_continued() {
  sigset_t stop;
  ::sigemptyset(&stop);
  ::sigaddset(&stop, SIGTSTP);
  ::raise(SIGTSTP);
  ::pthread_sigmask(SIG_UNBLOCK, &stop, nullptr);
  ::pthread_sigmask(SIG_BLOCK, &stop, nullptr);
}

void forward(int signal, int supervisor) {
  ::kill(supervisor, signal);
  if (signal != SIGTSTP) return;
  stop_until_continued();
  ::kill(supervisor, SIGCONT);
}

int guard(int supervisor, TerminalRelay& terminal) {
  SignalListener signals(kForwarded);
  PidFd ended(supervisor);
  std::array<PollItem, 4> items{PollItem{.target = &ended, .want_read = true},
                                PollItem{.target = &signals, .want_read = true},
                                PollItem{.target = &terminal.source()},
                                PollItem{.target = &terminal.sink()}};
  while (!items[0].can_read) {
    items[2].want_read = terminal.wants_input();
    items[3].want_write = terminal.has_pending();
    const Duration nap = terminal.is_open() ? kForegroundNap : kNap;
    poll_items(items, Deadline(monotonic_now() + nap));
    if (items[2].can_read) terminal.read();
    if (items[3].can_write || items[3].can_read) terminal.write();
    while (const auto signal = signals.try_next()) forward(*signal, supervisor);
  }
  const ExitStatus status = reap(supervisor);
  kill_everything_below();
  if (status.is_known && status.signal == 0) return status.code;
  const std::string ending =
      status.is_known ? "was ended by " + signal_name(status.signal)
                      : "was reaped by another part of this process, so its end is not known";
  const std::string message =
      cadre::format("cadre: the launcher's own process (pid {}) {}; its workers were killed\n",
                    supervisor, ending);
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, message.data(), message.size());
  return status.shell_code();
}

}  // namespace

void hold_forwarded_signals() {
  const sigset_t signals = signals_to_take(kForwarded);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

int run_guarded(const std::function<int(Pollable& guardian_gone)>& body,
                const GuardOptions& options) {
  auto life = make_pipe();
  if (!life.ok()) throw life.error();
  TerminalRelay terminal;
  if (options.passes_terminal && ::isatty(STDIN_FILENO) == 1) terminal.open();
  hold_forwarded_signals();
  // This process becomes a subreaper before it forks: the supervisor may have started workers and
  // been killed before this process runs again. The supervisor does not inherit the property.
  become_subreaper();
  const int supervisor = ::fork();
  if (supervisor < 0) throw errno_error(ErrorCode::kUnavailable, "start a process", errno);
  if (supervisor > 0) {
    life->read_end.close();
    terminal.close_reader();
    return guard(supervisor, terminal);
  }
  life->write_end.close();
  terminal.become_standard_input();
  ::setpgid(0, 0);
  become_subreaper();
  PipeReader guardian_gone(std::move(life->read_end));
  return body(guardian_gone);
}

}  // namespace cadre::os
