#include "cadre/launch/job/exit_meaning.h"

#include <signal.h>

#include <algorithm>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/signals.h"

namespace cadre::launch {
namespace {

std::string killed_meaning(uint64_t num_oom_kills) {
  if (num_oom_kills > 0) {
    return cadre::format(
        "killed, most likely because memory ran out: the kernel killed {} process{} of this "
        "machine for that reason during the job. Use a smaller batch or fewer workers",
        num_oom_kills, num_oom_kills == 1 ? "" : "es");
  }
  return "killed from outside: by someone's kill -9, a batch system's limit, or a container's "
         "memory "
         "limit (see dmesg)";
}

}  // namespace

bool exited_with_one_of(std::span<const int> codes, const os::ExitStatus& status) {
  return status.is_known && status.signal == 0 &&
         std::ranges::find(codes, status.code) != codes.end();
}

std::string exit_name(const os::ExitStatus& status) {
  if (!status.is_known) return "an unknown exit code";
  if (status.signal == 0) return cadre::format("exit code {}", status.code);
  return cadre::format("signal {} ({})", status.signal, os::signal_name(status.signal));
}

std::string exit_meaning(const os::ExitStatus& status, uint64_t num_oom_kills) {
  if (!status.is_known) return "it was reaped by something other than this launcher";
  switch (status.signal) {
    case 0:
      break;
    case SIGSEGV:
      return "invalid memory access";
    case SIGBUS:
      return "access to memory that does not exist: a mapped file that shrank, or shared memory "
             "that is full (df /dev/shm)";
    case SIGFPE:
      return "integer division by zero or overflow";
    case SIGILL:
      return "an instruction that this processor does not have: built for another one?";
    case SIGABRT:
      return "the program ended itself: an uncaught C++ exception, a failed assertion or a "
             "corrupted "
             "heap";
    case SIGKILL:
      return killed_meaning(num_oom_kills);
    case SIGTERM:
      return "asked to end, by someone other than this launcher";
    case SIGPIPE:
      return "wrote to a pipe or socket that nobody reads";
    case SIGXCPU:
      return "its CPU time limit is used up (ulimit -t)";
    case SIGXFSZ:
      return "its file size limit is reached (ulimit -f)";
    case SIGSYS:
      return "a system call that this sandbox forbids";
    default:
      return "";
  }
  switch (status.code) {
    case 126:
      return "a shell's code for a program that is there and cannot be executed";
    case 127:
      return "a shell's code for a program that was not found, or a missing shared library";
    case 128 + SIGKILL:
      return "a shell's code for a program that was killed (SIGKILL): " +
             killed_meaning(num_oom_kills);
    case 128 + SIGSEGV:
      return "a shell's code for a program that died of an invalid memory access (SIGSEGV)";
    case 128 + SIGABRT:
      return "a shell's code for a program that ended itself (SIGABRT)";
    default:
      return "";
  }
}

}  // namespace cadre::launch
