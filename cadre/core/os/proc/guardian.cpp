#include "cadre/core/os/proc/guardian.h"

#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <string>
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

int guard(int supervisor) {
  SignalListener signals(kForwarded);
  PidFd ended(supervisor);
  std::array<PollItem, 2> items{PollItem{.target = &ended, .want_read = true},
                                PollItem{.target = &signals, .want_read = true}};
  while (!items[0].can_read) {
    poll_items(items, Deadline(monotonic_now() + kNap));
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

int run_guarded(const std::function<int(Pollable& guardian_gone)>& body) {
  auto life = make_pipe();
  if (!life.ok()) throw life.error();
  hold_forwarded_signals();
  // This process becomes a subreaper before it forks: the supervisor may have started workers and
  // been killed before this process runs again. The supervisor does not inherit the property.
  become_subreaper();
  const int supervisor = ::fork();
  if (supervisor < 0) throw errno_error(ErrorCode::kUnavailable, "start a process", errno);
  if (supervisor > 0) {
    life->read_end.close();
    return guard(supervisor);
  }
  life->write_end.close();
  ::setpgid(0, 0);
  become_subreaper();
  PipeReader guardian_gone(std::move(life->read_end));
  return body(guardian_gone);
}

}  // namespace cadre::os
