#include "cadre/core/os/proc/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/native/monotonic_clock.h"
#include "cadre/core/os/native/poll.h"

namespace cadre::os {
namespace {

constexpr Duration kKillTimeout = std::chrono::seconds(1);

std::vector<char*> pointers_to(const std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (const std::string& text : texts) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// Has all that the child needs after fork(). It is made before the fork, because between fork and
// exec only async-signal-safe calls are allowed, and malloc is not one of them.
struct ChildPlan {
  const char* executable;
  std::vector<char*> arguments;
  std::vector<char*> environment;
  int parent_pid;
  int output;
  int error;
  int failure_report;
  int go_ahead;
  sigset_t ignored_signals;
  std::vector<LimitChange> limits;
  CoreMask cores;
  bool inherits_input;
};

[[noreturn]] void report_and_exit(int failure_report, int error_number) {
  [[maybe_unused]] const ssize_t written =
      ::write(failure_report, &error_number, sizeof(error_number));
  ::_exit(127);
}

// Waits for the parent's byte. The child itself holds an open write end, so the read does not end
// when the parent dies; the parent-death signal ends the child then.
void await_go_ahead(int go_ahead) {
  char byte = 0;
  while (::read(go_ahead, &byte, 1) < 0 && errno == EINTR) {
  }
}

[[noreturn]] void run_child(const ChildPlan& plan) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have died before prctl() took effect.
  if (::getppid() != plan.parent_pid) ::_exit(127);
  const int input = plan.inherits_input ? STDIN_FILENO : ::open("/dev/null", O_RDONLY);
  if (input < 0 || ::dup2(input, STDIN_FILENO) < 0 || ::dup2(plan.output, STDOUT_FILENO) < 0 ||
      ::dup2(plan.error, STDERR_FILENO) < 0) {
    report_and_exit(plan.failure_report, errno);
  }
  // Marks the inherited descriptors close-on-exec. So the report pipe ends when exec succeeds.
  ::syscall(SYS_close_range, 3U, ~0U, 4U /* CLOSE_RANGE_CLOEXEC */);
  set_child_signals(plan.ignored_signals);
  for (const LimitChange& limit : plan.limits) ::setrlimit(limit.resource, &limit.value);
  if (!plan.cores.apply()) report_and_exit(plan.failure_report, errno);
  await_go_ahead(plan.go_ahead);
  ::execve(plan.executable, plan.arguments.data(), plan.environment.data());
  report_and_exit(plan.failure_report, errno);
}

// A pipe whose two ends are blocking.
struct BlockingPipe {
  Fd reader;
  Fd writer;
};

Result<BlockingPipe> make_blocking_pipe() {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    return errno_error(ErrorCode::kUnavailable, "make a pipe", errno);
  }
  return BlockingPipe{.reader = Fd(ends[0]), .writer = Fd(ends[1])};
}

// Returns the errno with which the child failed to execute the program; 0 if it runs.
int read_failure(const Fd& report) {
  int error_number = 0;
  ssize_t got = 0;
  do {
    got = ::read(report.get(), &error_number, sizeof(error_number));
  } while (got < 0 && errno == EINTR);
  return got == sizeof(error_number) ? error_number : 0;
}

Error cannot_execute(const ProcessOptions& options, int error_number) {
  if (error_number == ENOEXEC) {
    return Error(
        ErrorCode::kInvalidArgument,
        cadre::format("\"{}\" cannot be executed: it is neither a program for this machine "
                      "nor a script that begins with #!",
                      options.executable));
  }
  if (error_number == ENOENT) {
    return Error(
        ErrorCode::kInvalidArgument,
        cadre::format("\"{}\" cannot be executed: the interpreter named in its first line, "
                      "or its loader, does not exist",
                      options.executable));
  }
  return errno_error(ErrorCode::kInvalidArgument,
                     cadre::format("\"{}\" cannot be executed", options.executable), error_number);
}

}  // namespace

Result<std::unique_ptr<Process>> Process::start(const ProcessOptions& options) {
  auto output = make_pipe();
  if (!output.ok()) return output.error();
  Result<Pipe> error = options.joins_output ? Pipe() : make_pipe();
  if (!error.ok()) return error.error();
  auto report = make_blocking_pipe();
  if (!report.ok()) return report.error();
  const auto go_ahead = make_blocking_pipe();
  if (!go_ahead.ok()) return go_ahead.error();

  const ChildPlan plan{.executable = options.executable.c_str(),
                       .arguments = pointers_to(options.arguments),
                       .environment = pointers_to(options.environment),
                       .parent_pid = ::getpid(),
                       .output = output->write_end.get(),
                       .error = (options.joins_output ? output : error)->write_end.get(),
                       .failure_report = report->writer.get(),
                       .go_ahead = go_ahead->reader.get(),
                       .ignored_signals = set_of_signals(options.ignored_signals),
                       .limits = changes_to(options.soft_limits),
                       .cores = CoreMask(options.cores),
                       .inherits_input = options.inherits_input};
  const int pid = ::fork();
  if (pid == 0) run_child(plan);
  if (pid < 0) return errno_error(ErrorCode::kUnavailable, "start a process", errno);
  // The child waits for the byte below, so it still exists and the number is its own, even if the
  // kernel reaps children at once because SIGCHLD is ignored.
  Fd exit_event(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  const int pidfd_error = errno;
  report->writer.close();
  [[maybe_unused]] const ssize_t written = ::write(go_ahead->writer.get(), "", 1);
  const int error_number = read_failure(report->reader);
  auto process = std::make_unique<Process>(Parts{.pid = pid,
                                                 .exit_event = std::move(exit_event),
                                                 .standard_output = std::move(output->read_end),
                                                 .standard_error = std::move(error->read_end)});
  if (error_number != 0) return cannot_execute(options, error_number);
  if (process->exit_event_.poll_handle() < 0) {
    return errno_error(ErrorCode::kUnavailable, "watch a process (pidfd_open)", pidfd_error);
  }
  return process;
}

Result<std::unique_ptr<Process>> Process::adopt(int pid, Fd standard_output, Fd standard_error) {
  Fd exit_event(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  const int pidfd_error = errno;
  auto process = std::make_unique<Process>(Parts{.pid = pid,
                                                 .exit_event = std::move(exit_event),
                                                 .standard_output = std::move(standard_output),
                                                 .standard_error = std::move(standard_error)});
  if (process->exit_event_.poll_handle() >= 0) return process;
  return errno_error(ErrorCode::kUnavailable, "watch a process (pidfd_open)", pidfd_error);
}

Process::Process(Parts parts)
    : pid_(parts.pid),
      exit_event_(std::move(parts.exit_event)),
      standard_output_(std::move(parts.standard_output)),
      standard_error_(std::move(parts.standard_error)) {}

Process::~Process() {
  if (try_wait()) return;
  // A program with set-user-ID may run as another user.
  if (::kill(-pid_, SIGKILL) != 0 && errno == EPERM) return;
  if (exit_event_.poll_handle() >= 0) {
    poll_one(exit_event_.poll_handle(), POLLIN, Deadline(monotonic_now() + kKillTimeout));
  }
  try_wait();
}

std::optional<ExitStatus> Process::try_wait() {
  if (!status_) status_ = try_reap(pid_);
  return status_;
}

std::optional<int> Process::stop_signal() const {
  if (status_) return std::nullopt;
  siginfo_t info{};
  // WNOWAIT is set so that the answer stays the same until the child is continued.
  const int found = ::waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WNOHANG | WNOWAIT);
  if (found != 0 || info.si_pid != pid_) return std::nullopt;
  return info.si_status;
}

void Process::signal(int signal) {
  if (!status_) ::kill(pid_, signal);
}

void Process::signal_group(int signal) {
  if (!status_) ::kill(-pid_, signal);
}

}  // namespace cadre::os
