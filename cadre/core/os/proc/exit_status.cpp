#include "cadre/core/os/proc/exit_status.h"

#include <sys/wait.h>

#include <cerrno>

namespace cadre::os {
namespace {

// Returns nullopt if the child has not ended. Repeats the call when a signal has interrupted it.
std::optional<ExitStatus> wait_with(int pid, int options) {
  int raw = 0;
  int reaped = 0;
  do {
    reaped = ::waitpid(pid, &raw, options);
  } while (reaped < 0 && errno == EINTR);
  if (reaped == 0) return std::nullopt;
  if (reaped < 0) return ExitStatus{.is_known = false};  // ECHILD
  return WIFSIGNALED(raw) ? ExitStatus{.signal = WTERMSIG(raw)}
                          : ExitStatus{.code = WEXITSTATUS(raw)};
}

}  // namespace

std::optional<ExitStatus> try_reap(int pid) {
  return wait_with(pid, WNOHANG);
}

ExitStatus reap(int pid) {
  return *wait_with(pid, 0);
}

}  // namespace cadre::os
