#include "cadre/os/native/native_thread.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
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

std::thread start_thread(const std::string& name, std::function<void()> body) {
  const SignalsBlocked inherited_by_the_thread;
  try {
    return std::thread([name, body = std::move(body)] {
      ::pthread_setname_np(::pthread_self(), name.c_str());
      body();
    });
  } catch (const std::system_error& e) {
    throw errno_error(ErrorCode::kUnavailable, cadre::format("start thread \"{}\"", name),
                      e.code().value());
  }
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
    : thread_(start_thread(name, std::move(body))) {}

void NativeThread::join() {
  thread_.join();
}

void run_detached(std::string name, std::function<void()> body) {
  static const AwaitedAtExit awaited;
  const std::shared_ptr<DetachedThreads> threads = awaited.threads();
  threads->begin();
  try {
    start_thread(name, [threads, body = std::move(body)] {
      body();
      threads->end();
    }).detach();
  } catch (...) {
    threads->end();
    throw;
  }
}

}  // namespace cadre::os
