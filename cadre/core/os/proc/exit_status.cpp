#include "cadre/core/os/proc/exit_status.h"

#include <sys/wait.h>

#include <cerrno>

namespace cadre::os {
namespace {

// Reaps the child with waitpid(), or returns nullopt if it has not ended. Repeats waitpid() when a
// signal has interrupted it.
std::optional<ExitStatus> wait_with(int pid, int options) {
  int raw = 0;
  int reaped = 0;
  do {
    reaped = ::waitpid(pid, &raw, options);
  } while (reaped < 0 && errno == EINTR);
  if (reaped == 0) return std::nullopt;
  if (reaped < 0) return ExitStatus{.is_known = false};  // ECHILD: the child was reaped elsewhere
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
