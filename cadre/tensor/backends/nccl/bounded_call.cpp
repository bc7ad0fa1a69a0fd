#include "cadre/tensor/backends/nccl/bounded_call.h"

#include <atomic>
#include <exception>
#include <memory>
#include <utility>

#include "cadre/core/os/keep_until_exit.h"
#include "cadre/core/os/system.h"

namespace cadre::nccl {
namespace {

// Shared by the caller and the thread, which may outlive the caller.
struct Call {
  explicit Call(std::function<void()> function) : run(std::move(function)) {}

  const std::function<void()> run;
  const std::unique_ptr<os::System> system = os::make_native_system();
  const std::unique_ptr<os::Waiter> waiter = system->make_waiter();
  std::atomic<bool> has_returned{false};
};

}  // namespace

bool returns_in_time(std::function<void()> function) try {
  const auto call = std::make_shared<Call>(std::move(function));
  std::unique_ptr<os::Thread> thread = call->system->spawn("cadre-nccl-end", [call] {
    call->run();
    call->has_returned = true;
    call->waiter->unpark();
  });
  const Deadline deadline = call->system->deadline_in(kMaxCallTime);
  while (!call->has_returned && !deadline.has_passed(call->system->now())) {
    call->waiter->park(deadline);
  }
  if (!call->has_returned) {
    os::keep_until_exit(std::pair(std::move(thread), call));  // the thread cannot be joined
    return false;
  }
  thread->join();
  return true;
} catch (const std::exception&) {
  return false;  // there is no thread or memory for the call
}

}  // namespace cadre::nccl
