#include "cadre/core/os/native/native_thread.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/native/futex.h"
#include "cadre/core/os/native/monotonic_clock.h"

namespace cadre::os {
namespace {

// Blocks the signals that are meant for the program, which expects them on its own threads; faults
// and the profiler's signal still reach the thread that caused them.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t blocked;
    ::sigfillset(&blocked);
    for (const int kept : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF}) {
      ::sigdelset(&blocked, kept);
    }
    ::pthread_sigmask(SIG_SETMASK, &blocked, &saved_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t saved_{};
};

// The default stack size of a thread is RLIMIT_STACK, which may be 64 KiB. A larger default is
// kept, because threads that prefetch run the program's Dataset::get.
constexpr size_t kMinStackBytes = size_t{8} << 20;

class StackAttributes {
 public:
  StackAttributes() {
    ::pthread_attr_init(&attributes_);
    size_t num_bytes = 0;
    ::pthread_attr_getstacksize(&attributes_, &num_bytes);
    ::pthread_attr_setstacksize(&attributes_, std::max(num_bytes, kMinStackBytes));
  }
  ~StackAttributes() { ::pthread_attr_destroy(&attributes_); }
  StackAttributes(const StackAttributes&) = delete;
  StackAttributes& operator=(const StackAttributes&) = delete;

  const pthread_attr_t* get() const { return &attributes_; }

 private:
  pthread_attr_t attributes_;
};

struct ThreadStart {
  std::string name;
  std::function<void()> body;
};

// An exception that leaves the body ends the process, as in std::thread.
void* run_thread(void* start) noexcept {
  const std::unique_ptr<ThreadStart> own(static_cast<ThreadStart*>(start));
  ::pthread_setname_np(::pthread_self(), own->name.c_str());
  own->body();
  return nullptr;
}

pthread_t start_thread(std::string name, std::function<void()> body) {
  const SignalsBlocked inherited_by_the_thread;
  const StackAttributes attributes;
  auto start = std::make_unique<ThreadStart>(ThreadStart{std::move(name), std::move(body)});
  pthread_t thread{};
  const int status = ::pthread_create(&thread, attributes.get(), run_thread, start.get());
  if (status != 0) {
    throw errno_error(ErrorCode::kUnavailable, cadre::format("start thread \"{}\"", start->name),
                      status);
  }
  (void)start.release();  // the new thread owns it
  return thread;
}

// The number of detached threads that run. It belongs to the process, because no object owns a
// detached thread. It has no destructor, because a detached thread may outlive static objects.
constinit std::atomic<uint32_t> num_detached{0};

constexpr Duration kTimeAtExit = std::chrono::seconds(2);

// The destructor runs at the end of the process, before objects that the threads use are destroyed.
// A forked child has the counter of its parent's threads, but not the threads.
class AwaitedAtExit {
 public:
  AwaitedAtExit() = default;
  ~AwaitedAtExit() {
    if (::getpid() != pid_) return;
    const TimePoint limit = monotonic_now() + kTimeAtExit;
    while (const uint32_t num_running = num_detached.load(std::memory_order_acquire)) {
      const Duration left = limit - monotonic_now();
      if (left <= Duration(0)) return;
      futex_wait(num_detached, num_running, left);
    }
  }
  AwaitedAtExit(const AwaitedAtExit&) = delete;
  AwaitedAtExit& operator=(const AwaitedAtExit&) = delete;

 private:
  const pid_t pid_ = ::getpid();
};

void note_detached_end() {
  num_detached.fetch_sub(1, std::memory_order_acq_rel);
  futex_wake_all(num_detached);
}

}  // namespace

NativeThread::NativeThread(std::string name, std::function<void()> body)
    : thread_(start_thread(std::move(name), std::move(body))) {}

void NativeThread::join() {
  if (!std::exchange(is_joined_, true)) ::pthread_join(thread_, nullptr);
}

void run_detached(std::string name, std::function<void()> body) {
  static const AwaitedAtExit awaited;
  num_detached.fetch_add(1, std::memory_order_acq_rel);
  try {
    ::pthread_detach(start_thread(std::move(name), [body = std::move(body)] {
      body();
      note_detached_end();
    }));
  } catch (...) {
    note_detached_end();
    throw;
  }
}

}  // namespace cadre::os
