#include "cadre/os/native/native_thread.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/os/io/errno_error.h"

namespace cadre::os {
namespace {

// Blocks the signals that are meant for the program, which expects them on threads of its own;
// faults and the profiler's signal stay with the thread that caused them.
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

// The default of a thread is RLIMIT_STACK, which may be 64 KiB; the threads that fetch ahead run
// the program's Dataset::get, so a larger default stays.
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

// As in std::thread, an exception that leaves the body ends the process.
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
  (void)start.release();  // the thread's
  return thread;
}

// Counts the detached threads.
class DetachedThreads {
 public:
  void begin() {
    const std::lock_guard lock(mutex_);
    ++num_running_;
  }
  void end() {
    const std::lock_guard lock(mutex_);
    --num_running_;
    changed_.notify_all();
  }
  void await_all(std::chrono::seconds limit) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, limit, [this] { return num_running_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_running_ = 0;
};

// Its destructor runs at the end of the process, before objects are destroyed that the threads use.
class AwaitedAtExit {
 public:
  ~AwaitedAtExit() { threads_->await_all(std::chrono::seconds(2)); }
  const std::shared_ptr<DetachedThreads>& threads() const { return threads_; }

 private:
  // Shared with the threads, which may outlive it.
  const std::shared_ptr<DetachedThreads> threads_ = std::make_shared<DetachedThreads>();
};

}  // namespace

NativeThread::NativeThread(std::string name, std::function<void()> body)
    : thread_(start_thread(std::move(name), std::move(body))) {}

void NativeThread::join() {
  if (!std::exchange(is_joined_, true)) ::pthread_join(thread_, nullptr);
}

void run_detached(std::string name, std::function<void()> body) {
  static const AwaitedAtExit awaited;
  const std::shared_ptr<DetachedThreads> threads = awaited.threads();
  threads->begin();
  try {
    ::pthread_detach(start_thread(std::move(name), [threads, body = std::move(body)] {
      body();
      threads->end();
    }));
  } catch (...) {
    threads->end();
    throw;
  }
}

}  // namespace cadre::os
