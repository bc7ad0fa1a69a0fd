#include "cadre/testing/core/process_ranks.h"

// Each rank writes its outcome into a pipe and exits. The parent reads all pipes to the end, kills
// the processes that still run at the deadline, and reaps every child.
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/native/monotonic_clock.h"
#include "cadre/core/os/native/poll.h"

namespace cadre::testing {
namespace {

struct Pipe {
  os::Fd read_end;
  os::Fd write_end;
};

Pipe make_pipe() {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) throw os::errno_error(ErrorCode::kUnavailable, "pipe", errno);
  return {os::Fd(ends[0]), os::Fd(ends[1])};
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return;  // the parent, which reads this pipe, has ended
    text.remove_prefix(static_cast<size_t>(written));
  }
}

// The code of the child process. It writes to the pipe the length of the failure's text in decimal,
// a newline, the failure, and the output. If the process was killed before, the pipe has no
// newline.
[[noreturn]] void run_child(os::Fd out, pid_t parent, int rank, int world_size,
                            const os::Address& rendezvous_address, const RankMain& rank_main) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have ended before prctl() was called; then the kernel will never kill this
  // process.
  if (::getppid() != parent) ::_exit(1);
  std::string output;
  const std::string failure = failure_of([&] {
    const std::unique_ptr<os::System> system = os::make_native_system();
    RankContext context{*system, rank, world_size, rendezvous_address, {}};
    rank_main(context);
    output = std::move(context.output);
  });
  write_all(out.get(), cadre::format("{}\n{}{}", failure.size(), failure, output));
  ::_exit(0);
}

struct Child {
  pid_t pid = -1;
  os::Fd pipe;
  std::string received;
};

// Reads some bytes. Returns false at the end of the pipe.
bool read_some(Child& child) {
  char buffer[4096];
  const ssize_t got = ::read(child.pipe.get(), buffer, sizeof(buffer));
  if (got < 0 && errno == EINTR) return true;
  if (got <= 0) return false;
  child.received.append(buffer, static_cast<size_t>(got));
  return true;
}

std::string describe_end(int status, bool was_late, Duration limit) {
  if (was_late) {
    return cadre::format("had not ended after {} ms and was killed", limit.count() / 1'000'000);
  }
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    return cadre::format("killed by signal {} ({})", signal, ::strsignal(signal));
  }
  return cadre::format("exited with code {} without an outcome", WEXITSTATUS(status));
}

RankOutcome parse_outcome(const std::string& received, int status, bool was_late, Duration limit) {
  RankOutcome outcome;
  const size_t newline = received.find('\n');
  const bool is_whole =
      newline != std::string::npos && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (is_whole) {
    const size_t size = std::stoul(received.substr(0, newline));
    outcome.failure = received.substr(newline + 1, size);
    outcome.output = received.substr(newline + 1 + size);
    return outcome;
  }
  outcome.failure = describe_end(status, was_late, limit);
  if (WIFSIGNALED(status)) outcome.signal = WTERMSIG(status);
  return outcome;
}

// The processes of the ranks. The destructor kills and reaps those that still run.
class Children {
 public:
  ~Children() {
    for (const Child& child : children_) {
      if (child.pid > 0) ::kill(child.pid, SIGKILL);
    }
    for (Child& child : children_) {
      if (child.pid > 0) reap(child);
    }
  }

  void start(int rank, int world_size, const os::Address& address, const RankMain& rank_main) {
    Pipe pipe = make_pipe();
    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) throw os::errno_error(ErrorCode::kUnavailable, "fork a rank", errno);
    if (pid == 0) {
      run_child(std::move(pipe.write_end), parent, rank, world_size, address, rank_main);
    }
    children_.push_back({pid, std::move(pipe.read_end), {}});
  }

  std::vector<int> pids() const {
    std::vector<int> result;
    for (const Child& child : children_) result.push_back(child.pid);
    return result;
  }

  RanksResult collect(Duration limit) {
    const Deadline deadline(os::monotonic_now() + limit);
    RanksResult result;
    for (Child& child : children_) {
      bool was_late = false;
      // The pipes are read one after the other. A pipe that is not being read can buffer 64 KiB.
      while (!was_late) {
        if (!os::poll_one(child.pipe.get(), POLLIN, deadline)) {
          was_late = true;
        } else if (!read_some(child)) {
          break;
        }
      }
      if (was_late) ::kill(child.pid, SIGKILL);
      result.ranks.push_back(parse_outcome(child.received, reap(child), was_late, limit));
    }
    return result;
  }

 private:
  static int reap(Child& child) {
    int status = 0;
    while (::waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
    }
    child.pid = -1;
    return status;
  }

  std::vector<Child> children_;
};

}  // namespace

RanksResult run_ranks_as_processes(int world_size, const RankMain& rank_main,
                                   const ProcessOptions& options) {
  const os::Address address = make_rendezvous_address(*os::make_native_system());
  Children children;
  for (int rank = 0; rank < world_size; ++rank) {
    children.start(rank, world_size, address, rank_main);
  }
  if (options.disturb) options.disturb(children.pids());
  return children.collect(options.time_limit);
}

}  // namespace cadre::testing
