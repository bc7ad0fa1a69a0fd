#include "cadre/core/os/proc/fork/prepare_restart.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "cadre/core/os/host/secret_variable.h"
#include "cadre/core/os/proc/fork/fork_request.h"
#include "cadre/core/os/proc/fork/fork_server.h"
#include "cadre/core/os/proc/fork/fork_template.h"

namespace cadre {
namespace {

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

// Serves requests of the launcher, and returns only in the forked workers. The template exits when
// the launcher's connection ends.
void serve(const std::string& path, int program_pid, os::Fd ready) {
  ::setpgid(0, 0);  // signals to rank 0's group are not meant for the template
  os::leave_streams();
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
  os::serve_fork_requests(launcher.get());
}

}  // namespace

void prepare_restart() {
  const char* const variable = std::getenv(os::ForkServer::kVariable);
  if (variable == nullptr) return;
  const std::string path = variable;
  ::unsetenv(os::ForkServer::kVariable);
  int ends[2] = {-1, -1};
  if (path.empty() || os::count_threads() != 1 || ::pipe2(ends, O_CLOEXEC) != 0) return;
  const os::Fd reader(ends[0]);
  os::Fd writer(ends[1]);
  os::flush_streams();  // else the workers would write the same text again
  const int program_pid = ::getpid();
  // The template is a grandchild, so that the program's own calls of wait() do not find it.
  const int middle = ::fork();
  if (middle == 0) {
    if (::fork() != 0) ::_exit(0);
    return serve(path, program_pid, std::move(writer));
  }
  writer.close();
  if (middle < 0) return;
  os::wait_for_end(middle);
  char byte = 0;
  while (::read(reader.get(), &byte, 1) < 0 && errno == EINTR) {
  }
}

}  // namespace cadre
