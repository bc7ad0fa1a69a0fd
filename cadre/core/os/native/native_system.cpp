// The System of the real world: Linux's clock, threads, futexes, sockets and memfds.
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "cadre/core/os/host/host_info.h"
#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/io/handle_owner.h"
#include "cadre/core/os/native/connect.h"
#include "cadre/core/os/native/futex.h"
#include "cadre/core/os/native/monotonic_clock.h"
#include "cadre/core/os/native/native_socket.h"
#include "cadre/core/os/native/native_thread.h"
#include "cadre/core/os/native/poll.h"
#include "cadre/core/os/native/segment.h"
#include "cadre/core/os/process_watcher.h"
#include "cadre/core/os/system.h"

namespace cadre::os {
namespace {

// The number of pause instructions of a wait before it sleeps. They take about 20 us: longer than a
// hand-over between cores, shorter than a futex round trip under load.
constexpr int kSpinLimit = 2000;

// A poll returns at once for an event whose descriptor was closed; without this pause its loop
// would spin.
constexpr auto kPauseOfClosedEvent = std::chrono::milliseconds(10);

// An Event on an eventfd. An event whose descriptor was closed from outside (fd.h) does nothing;
// its poll ends within kHandleLook.
class NativeEvent final : public Event, public HandleOwner {
 public:
  // Throws Error(kUnavailable) when the process has no descriptor left.
  NativeEvent() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (!fd_.is_open()) throw errno_error(ErrorCode::kUnavailable, "eventfd", errno);
  }

  void notify() override;
  void clear() override;
  int poll_handle() const override { return fd_.get(); }
  bool owns_handle() const override { return fd_.is_own(); }

 private:
  Fd fd_;
};

void NativeEvent::notify() {
  if (!fd_.is_own()) return;  // the number may belong to a file of the program
  const uint64_t one = 1;
  // EAGAIN means that the counter is full: then the event is readable already.
  while (::write(fd_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void NativeEvent::clear() {
  if (!fd_.is_own()) return std::this_thread::sleep_for(kPauseOfClosedEvent);
  uint64_t count = 0;
  // EAGAIN means that there was nothing to clear.
  while (::read(fd_.get(), &count, sizeof(count)) < 0 && errno == EINTR) {
  }
}

// A Waiter on a futex.
class NativeWaiter final : public Waiter {
 public:
  bool park(Deadline deadline) override;
  void unpark() override;

 private:
  std::atomic<uint32_t> is_unparked_{0};
};

bool NativeWaiter::park(Deadline deadline) {
  while (is_unparked_.exchange(0, std::memory_order_acquire) == 0) {
    const TimePoint now = monotonic_now();
    if (deadline.has_passed(now)) return false;
    futex_wait(is_unparked_, 0, deadline.remaining(now));
  }
  return true;
}

void NativeWaiter::unpark() {
  // A second unpark before the park has no effect, and needs no system call.
  if (is_unparked_.exchange(1, std::memory_order_release) == 0) futex_wake_all(is_unparked_);
}

// Becomes readable when the watched process has ended, even if it was reaped. The process need not
// be a child of this one.
class ProcessWatch final : public Pollable, public HandleOwner {
 public:
  explicit ProcessWatch(Fd pidfd) : pidfd_(std::move(pidfd)) {}
  int poll_handle() const override { return pidfd_.get(); }
  bool owns_handle() const override { return pidfd_.is_own(); }

 private:
  Fd pidfd_;
};

class NativeSystem final : public System, public ProcessWatcher {
 public:
  TimePoint now() override { return monotonic_now(); }
  HostInfo host() override { return read_host_info(); }

  std::unique_ptr<Thread> spawn(std::string name, std::function<void()> body) override {
    return std::make_unique<NativeThread>(std::move(name), std::move(body));
  }
  std::unique_ptr<Waiter> make_waiter() override { return std::make_unique<NativeWaiter>(); }

  int spin_limit() override { return spin_limit_; }
  void yield() override { ::sched_yield(); }
  bool wait_while(WaitWord& word, uint32_t old, Deadline deadline) override;
  void publish(WaitWord& word, uint32_t value) override;
  void wake(WaitWord& word) override;

  bool poll(std::span<PollItem> items, Deadline deadline) override {
    return poll_items(items, deadline);
  }
  Result<std::unique_ptr<Listener>> listen(const Address& address) override;
  Result<std::unique_ptr<Socket>> connect(const Address& address, Deadline deadline) override;
  std::unique_ptr<Event> make_event() override { return std::make_unique<NativeEvent>(); }
  Result<std::unique_ptr<SharedMemory>> create_segment(size_t num_bytes) override {
    return segments_.create(num_bytes);
  }
  void random_bytes(Bytes out) override;

  uint64_t pid_namespace() override;
  std::unique_ptr<Pollable> watch_process(int pid) override;

 private:
  // Spinning on the only core would keep the awaited thread from running.
  const int spin_limit_ = num_online_cores() > 1 ? kSpinLimit : 0;
  SegmentTable segments_;
};

// No wake-up is lost: the sleeper increments the count of sleepers, then reads the value; the
// publisher stores the value, then reads the count. All four are sequentially consistent, so at
// least one of the two sees the other's store, and the kernel compares the value once more before
// it puts a thread to sleep. A process that is killed while it sleeps leaves the count too high,
// which only costs the others a system call in each publish.
bool NativeSystem::wait_while(WaitWord& word, uint32_t old, Deadline deadline) {
  const TimePoint start = now();
  if (word.value.load(std::memory_order_acquire) != old) return true;
  if (deadline.has_passed(start)) return false;
  word.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (word.value.load(std::memory_order_seq_cst) == old) {
    futex_wait(word.value, old, std::min(deadline.remaining(start), kMaxNap));
  }
  word.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return word.value.load(std::memory_order_acquire) != old || !deadline.has_passed(now());
}

void NativeSystem::publish(WaitWord& word, uint32_t value) {
  word.value.store(value, std::memory_order_seq_cst);
  if (word.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(word.value);
}

void NativeSystem::wake(WaitWord& word) {
  futex_wake_all(word.value);
}

Result<std::unique_ptr<Listener>> NativeSystem::listen(const Address& address) {
  auto fds = open_listeners(address);
  if (!fds.ok()) return fds.error();
  return std::unique_ptr<Listener>(std::make_unique<NativeListener>(*std::move(fds), segments_));
}

Result<std::unique_ptr<Socket>> NativeSystem::connect(const Address& address, Deadline deadline) {
  auto fd = connect_socket(address, deadline);
  if (!fd.ok()) return fd.error();
  return std::unique_ptr<Socket>(std::make_unique<NativeSocket>(*std::move(fd), segments_));
}

void NativeSystem::random_bytes(Bytes out) {
  while (!out.empty()) {
    const ssize_t got = ::getrandom(out.data(), out.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw errno_error(ErrorCode::kInternal, "getrandom", errno);
    out = out.subspan(static_cast<size_t>(got));
  }
}

uint64_t NativeSystem::pid_namespace() {
  struct stat info {};
  return ::stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

std::unique_ptr<Pollable> NativeSystem::watch_process(int pid) {
  Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!pidfd.is_open()) return nullptr;
  return std::make_unique<ProcessWatch>(std::move(pidfd));
}

}  // namespace

std::unique_ptr<System> make_native_system() {
  return std::make_unique<NativeSystem>();
}

}  // namespace cadre::os
