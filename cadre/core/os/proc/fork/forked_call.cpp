#include "cadre/core/os/proc/fork/forked_call.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/native/monotonic_clock.h"
#include "cadre/core/os/native/poll.h"
#include "cadre/core/os/proc/fork/fork_template.h"
#include "cadre/core/os/proc/pipe.h"
#include "cadre/core/os/proc/process.h"
#include "cadre/core/os/proc/signals.h"

namespace cadre::os {
namespace {

constexpr std::array kForwarded{SIGINT, SIGTERM, SIGHUP, SIGQUIT};
// The longest single wait: longer waits are repeated, because every wait has a deadline.
constexpr Duration kNap = std::chrono::minutes(1);

[[noreturn]] void run_child(int parent, Fd message,
                            const std::function<int(const MessageToParent&)>& body) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(1);
  const int code = body(MessageToParent(std::move(message)));
  flush_streams();
  ::_exit(code);
}

// Waits for the end of the child and returns the first signal that was forwarded to it.
int forward_until_end(Process& child) {
  SignalListener signals(kForwarded);
  int first = 0;
  std::array<PollItem, 2> items{PollItem{.target = &child.exit_event(), .want_read = true},
                                PollItem{.target = &signals, .want_read = true}};
  while (!items[0].can_read) {
    poll_items(items, Deadline(monotonic_now() + kNap));
    while (const auto signal = signals.try_next()) {
      if (first == 0) first = *signal;
      child.signal(*signal);
    }
  }
  return first;
}

std::string read_all(PipeReader& reader) {
  std::array<std::byte, MessageToParent::kMaxBytes> buffer{};
  const PipeReader::Chunk chunk = reader.try_read(buffer);
  return std::string(reinterpret_cast<const char*>(buffer.data()), chunk.num_bytes);
}

}  // namespace

void MessageToParent::write(std::string text) const {
  if (text.size() > kMaxBytes) text.resize(kMaxBytes);
  [[maybe_unused]] const ssize_t written = ::write(pipe_.get(), text.data(), text.size());
}

Result<ForkedCallEnd> call_in_fork(const std::function<int(const MessageToParent&)>& body) {
  auto pipe = make_pipe();
  if (!pipe.ok()) return pipe.error();
  flush_streams();
  const int parent = ::getpid();
  const int pid = ::fork();
  if (pid < 0) return errno_error(ErrorCode::kUnavailable, "start a process", errno);
  if (pid == 0) {
    pipe->read_end.close();
    run_child(parent, std::move(pipe->write_end), body);
  }
  pipe->write_end.close();
  auto child = Process::adopt(pid, std::move(pipe->read_end), Fd());
  if (!child.ok()) return child.error();
  const int signal = forward_until_end(**child);
  const auto status = (*child)->try_wait();
  return ForkedCallEnd{.pid = pid,
                       .status = status.value_or(ExitStatus{.is_known = false}),
                       .message = read_all((*child)->standard_output()),
                       .signal = signal};
}

}  // namespace cadre::os
