#include "cadre/core/os/proc/fork/prepare_restart.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>
#include <system_error>

#include <fcntl.h>

#include "cadre/core/os/host/secret_variable.h"
#include "cadre/core/os/proc/fork/fork_request.h"
#include "cadre/core/os/proc/fork/fork_server.h"
#include "cadre/core/os/proc/inherited.h"

namespace cadre {
namespace {

bool has_one_thread() {
  std::error_code failure;
  const std::filesystem::directory_iterator threads("/proc/self/task", failure);
  return !failure && std::distance(begin(threads), end(threads)) == 1;
}

void wait_for_end(int child) {
  while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
}

os::Fd connect_to_launcher(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return {};
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  os::Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return {};
  }
  return socket;
}

// Redirects stdin, stdout and stderr to /dev/null. Otherwise the template would keep the pipes of
// rank 0's output open.
void leave_streams() {
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int stream = 0; stream <= 2; ++stream) ::dup2(nothing, stream);
  ::close(nothing);
}

// Waits until the process between the template and this worker has ended and the launcher has
// adopted the worker. From then on the kernel kills the worker when the launcher dies.
void await_adoption(int middle, int launcher) {
  const timespec pause = {.tv_sec = 0, .tv_nsec = 20'000};
  while (::getppid() == middle) ::nanosleep(&pause, nullptr);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != launcher) ::_exit(127);
}

void become_worker(const os::ReceivedForkRequest& received) {
  const os::ForkRequest& request = received.request;
  ::setpgid(0, 0);
  if (::dup2(received.output.get(), STDOUT_FILENO) < 0 ||
      ::dup2(received.error.get(), STDERR_FILENO) < 0) {
    ::_exit(127);
  }
  for (const os::LimitChange& limit : os::changes_to(request.soft_limits)) {
    ::setrlimit(limit.resource, &limit.value);
  }
  if (!os::CoreMask(request.cores).apply()) ::_exit(127);
  ::clearenv();
  for (const std::string& text : request.environment) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos) continue;
    ::setenv(text.substr(0, equals).c_str(), text.c_str() + equals + 1, /*overwrite=*/1);
  }
  ::unsetenv(os::ForkServer::kVariable);
  os::set_child_signals(os::set_of_signals(request.ignored_signals));
}

// Forks a worker, in which it returns true. In the template it returns false; `pid` is the number
// of the worker, or -1. The worker is a grandchild, so that the launcher adopts it at once and
// reaps it like a child.
bool fork_worker(const os::ReceivedForkRequest& received, int32_t& pid) {
  pid = -1;
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) return false;
  const os::Fd reader(ends[0]);
  os::Fd writer(ends[1]);
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

// Serves requests of the launcher, and returns only in the forked workers. The template exits when
// the launcher's connection ends.
void serve(const std::string& path, int program_pid, os::Fd ready) {
  ::setpgid(0, 0);  // signals to rank 0's group are not meant for the template
  leave_streams();
  // The token is removed from the environment. Otherwise /proc/PID/environ of every worker would
  // show it, as it does for the template.
  os::take_secret_variable("CADRE_JOB_TOKEN");
  const os::Fd launcher = connect_to_launcher(path);
  os::ForkHello hello = os::make_fork_hello();
  hello.program_pid = program_pid;
  if (!launcher.is_open() || !os::send_bytes(launcher.get(), &hello, sizeof(hello)).ok()) {
    ::_exit(1);
  }
  ready.close();  // lets rank 0 continue
  while (true) {
    const auto received = os::receive_fork_request(launcher.get());
    if (!received.ok()) ::_exit(0);
    int32_t pid = 0;
    if (fork_worker(*received, pid)) return;
    if (!os::send_bytes(launcher.get(), &pid, sizeof(pid)).ok()) ::_exit(1);
  }
}

}  // namespace

void prepare_restart() {
  const char* const variable = std::getenv(os::ForkServer::kVariable);
  if (variable == nullptr) return;
  const std::string path = variable;
  ::unsetenv(os::ForkServer::kVariable);
  int ends[2] = {-1, -1};
  if (path.empty() || !has_one_thread() || ::pipe2(ends, O_CLOEXEC) != 0) return;
  const os::Fd reader(ends[0]);
  os::Fd writer(ends[1]);
  std::fflush(nullptr);  // else the workers would write the same text again
  const int program_pid = ::getpid();
  // The template is a grandchild, so that the program's own calls of wait() do not find it.
  const int middle = ::fork();
  if (middle == 0) {
    if (::fork() != 0) ::_exit(0);
    return serve(path, program_pid, std::move(writer));
  }
  writer.close();
  if (middle < 0) return;
  wait_for_end(middle);
  char byte = 0;
  while (::read(reader.get(), &byte, 1) < 0 && errno == EINTR) {
  }
}

}  // namespace cadre
