#include "cadre/core/os/proc/fork/fork_server.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/native/monotonic_clock.h"
#include "cadre/core/os/native/poll.h"
#include "cadre/core/os/proc/exit_status.h"
#include "cadre/core/os/proc/fork/fork_request.h"
#include "cadre/core/os/proc/fork/fork_template.h"

namespace cadre::os {
namespace {

constexpr Duration kTemplateKillTimeout = std::chrono::seconds(1);
constexpr timeval kHelloTimeout = {.tv_sec = 1, .tv_usec = 0};
constexpr timeval kAnswerTimeout = {.tv_sec = 5, .tv_usec = 0};

void set_timeout(const Fd& socket, const timeval& timeout) {
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
}

bool executes(int pid, const std::string& executable) {
  std::error_code failure;
  return std::filesystem::equivalent(cadre::format("/proc/{}/exe", pid), executable, failure);
}

}  // namespace

Result<std::unique_ptr<ForkServer>> ForkServer::listen(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return Error(ErrorCode::kUnavailable,
                 cadre::format("listen at {}: the path is too long for a unix socket", path));
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  Fd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.is_open() ||
      ::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(listener.get(), 1) != 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("listen at {}", path), errno);
  }
  return std::make_unique<ForkServer>(path, std::move(listener));
}

Result<std::unique_ptr<ForkServer>> ForkServer::start(const std::function<int()>& worker_main) {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return errno_error(ErrorCode::kUnavailable, "socketpair", errno);
  }
  Fd launcher(ends[0]);
  Fd own(ends[1]);
  const int pid = ::fork();
  if (pid < 0) return errno_error(ErrorCode::kUnavailable, "start a process", errno);
  if (pid == 0) {
    launcher.close();
    ::setpgid(0, 0);  // a signal to the launcher's group is not meant for the template
    leave_streams();
    serve_fork_requests(own.get());
    own.close();
    const int code = worker_main();
    flush_streams();
    ::_exit(code);
  }
  set_timeout(launcher, kAnswerTimeout);
  auto server = std::make_unique<ForkServer>("", Fd());
  server->connection_ = std::move(launcher);
  server->template_pid_ = pid;
  return server;
}

ForkServer::~ForkServer() {
  if (!template_pid_) return;
  const Fd end(static_cast<int>(::syscall(SYS_pidfd_open, *template_pid_, 0)));
  ::kill(*template_pid_, SIGKILL);
  if (end.is_open()) poll_one(end.get(), POLLIN, Deadline(monotonic_now() + kTemplateKillTimeout));
  try_reap(*template_pid_);
}

void ForkServer::accept_template(int program_pid, const std::string& executable) {
  if (template_pid_) return;
  Fd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!connection.is_open()) return;
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (::getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return;
  set_timeout(connection, kHelloTimeout);
  ForkHello hello;
  const bool is_right =
      peer.uid == ::geteuid() && receive_bytes(connection.get(), &hello, sizeof(hello)).ok() &&
      is_of_this_build(hello) && hello.program_pid == program_pid && executes(peer.pid, executable);
  if (!is_right) return;  // the template ends when its connection does
  set_timeout(connection, kAnswerTimeout);
  connection_ = std::move(connection);
  template_pid_ = peer.pid;
}

Result<int> ForkServer::request(const ProcessOptions& options, int output, int error) {
  const ForkRequest request{.launcher_pid = ::getpid(),
                            .ignored_signals = options.ignored_signals,
                            .soft_limits = options.soft_limits,
                            .cores = options.cores,
                            .environment = options.environment};
  CADRE_RETURN_IF_ERROR(send_fork_request(connection_.get(), request, output, error));
  int32_t pid = 0;
  CADRE_RETURN_IF_ERROR(receive_bytes(connection_.get(), &pid, sizeof(pid)));
  if (pid > 0) return pid;
  return Error(ErrorCode::kUnavailable, "the template process could not fork a worker");
}

Result<std::unique_ptr<Process>> ForkServer::fork_process(const ProcessOptions& options) {
  auto output = make_pipe();
  if (!output.ok()) return output.error();
  Result<Pipe> error = options.joins_output ? Pipe() : make_pipe();
  if (!error.ok()) return error.error();
  const auto pid = request(options, output->write_end.get(),
                           (options.joins_output ? output : error)->write_end.get());
  if (!pid.ok()) {
    connection_.close();  // the template ends, and a worker that it may have forked with it
    return pid.error();
  }
  return Process::adopt(*pid, std::move(output->read_end), std::move(error->read_end));
}

}  // namespace cadre::os
