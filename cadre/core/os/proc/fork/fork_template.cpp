#include "cadre/core/os/proc/fork/fork_template.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <string>
#include <system_error>

#include "cadre/core/os/proc/fork/fork_request.h"
#include "cadre/core/os/proc/fork/fork_server.h"
#include "cadre/core/os/proc/inherited.h"

namespace cadre::os {
namespace {

// Waits until the process between the template and this worker has ended and the launcher has
// adopted the worker. From then on the kernel kills the worker when the launcher dies.
void await_adoption(int middle, int launcher) {
  const timespec pause = {.tv_sec = 0, .tv_nsec = 20'000};
  while (::getppid() == middle) ::nanosleep(&pause, nullptr);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != launcher) ::_exit(127);
}

void become_worker(const ReceivedForkRequest& received) {
  const ForkRequest& request = received.request;
  ::setpgid(0, 0);
  if (::dup2(received.output.get(), STDOUT_FILENO) < 0 ||
      ::dup2(received.error.get(), STDERR_FILENO) < 0) {
    ::_exit(127);
  }
  for (const LimitChange& limit : changes_to(request.soft_limits)) {
    ::setrlimit(limit.resource, &limit.value);
  }
  if (!CoreMask(request.cores).apply()) ::_exit(127);
  ::clearenv();
  for (const std::string& text : request.environment) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos) continue;
    ::setenv(text.substr(0, equals).c_str(), text.c_str() + equals + 1, /*overwrite=*/1);
  }
  ::unsetenv(ForkServer::kVariable);
  set_child_signals(set_of_signals(request.ignored_signals));
}

// Forks a worker, in which it returns true. In the template it returns false; `pid` is the number
// of the worker, or -1. The worker is a grandchild, so that the launcher adopts it at once and
// reaps it like a child.
bool fork_worker(const ReceivedForkRequest& received, int32_t& pid) {
  pid = -1;
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) return false;
  const Fd reader(ends[0]);
  Fd writer(ends[1]);
  const int middle = ::fork();
  if (middle == 0) {
    const int middle_pid = ::getpid();
    const int32_t worker = ::fork();
    if (worker == 0) {
      await_adoption(middle_pid, received.request.launcher_pid);
      become_worker(received);
      return true;
    }
    [[maybe_unused]] const ssize_t written = ::write(writer.get(), &worker, sizeof(worker));
    ::_exit(0);
  }
  writer.close();
  if (middle < 0) return false;
  // When the process between the template and the worker has ended, the launcher has adopted the
  // worker.
  wait_for_end(middle);
  if (::read(reader.get(), &pid, sizeof(pid)) != sizeof(pid)) pid = -1;
  return false;
}

}  // namespace

int count_threads() {
  std::error_code failure;
  const std::filesystem::directory_iterator threads("/proc/self/task", failure);
  return failure ? 0 : static_cast<int>(std::distance(begin(threads), end(threads)));
}

void wait_for_end(int child) {
  while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void leave_streams() {
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int stream = 0; stream <= 2; ++stream) ::dup2(nothing, stream);
  ::close(nothing);
}

void flush_streams() {
  std::cout.flush();  // tidy: allow, writes nothing of the library's own
  std::clog.flush();
  std::fflush(nullptr);
}

void serve_fork_requests(int launcher) {
  while (true) {
    const auto received = receive_fork_request(launcher);
    if (!received.ok()) ::_exit(0);
    int32_t pid = 0;
    if (fork_worker(*received, pid)) return;
    if (!send_bytes(launcher, &pid, sizeof(pid)).ok()) ::_exit(1);
  }
}

}  // namespace cadre::os
