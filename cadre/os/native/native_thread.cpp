#include "cadre/os/native/native_thread.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>

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

}  // namespace

NativeThread::NativeThread(std::string name, std::function<void()> body) {
  const SignalsBlocked inherited_by_the_thread;
  try {
    thread_ = std::thread([name, body = std::move(body)] {
      ::pthread_setname_np(::pthread_self(), name.c_str());
      body();
    });
  } catch (const std::system_error& e) {
    throw errno_error(ErrorCode::kUnavailable, cadre::format("start thread \"{}\"", name),
                      e.code().value());
  }
}

void NativeThread::join() {
  thread_.join();
}

}  // namespace cadre::os
