#include "cadre/comm/queue/operation_queue.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/comm/queue/completion.h"
#include "cadre/comm/queue/thrown_error.h"
#include "cadre/comm/queue/waiter_listing.h"

namespace cadre {
namespace {

// An upper bound for a sleep: every change wakes the sleeper.
constexpr Duration kLookAgain = std::chrono::seconds(60);

}  // namespace

class OperationQueue::Issued final : public IssuedState {
 public:
  Issued(std::shared_ptr<OperationQueue> queue, Operation operation)
      : queue_(std::move(queue)), operation_(std::move(operation)) {}

  void wait(std::optional<Deadline> deadline) override {
    queue_->fork_guard_->check();
    if (!is_completed()) queue_->wait_for(*this, deadline);
    rethrow();
  }
  Operation& operation() { return operation_; }
  // Not under the queue's lock: a deleter may use the queue. Before complete(), so that a caller
  // whose wait has ended finds it released.
  void release_owner() { operation_.keep_alive.reset(); }
  void complete(Status status) { complete_with(std::move(status)); }

 private:
  const std::shared_ptr<OperationQueue> queue_;
  Operation operation_;
};

OperationQueue::OperationQueue(os::System& system, OperationRunner& runner,
                               std::shared_ptr<const ForkGuard> fork_guard)
    : system_(system),
      runner_(runner),
      fork_guard_(std::move(fork_guard)),
      thread_(system, "cadre-progress") {}

OperationQueue::~OperationQueue() = default;

void OperationQueue::run(Operation& operation) {
  std::shared_ptr<Issued> queued;
  {
    std::lock_guard lock(mutex_);
    if (refusal_) throw *refusal_;
    operation.number = ++num_issued_;
    if (pending_.empty() && !is_role_taken_) {
      is_role_taken_ = true;
    } else {
      queued = std::make_shared<Issued>(shared_from_this(), operation);
      pending_.push_back(queued);
    }
  }
  if (queued == nullptr) {
    const HeldRole role(*this);
    const Status status = run_caught(operation);
    has_run_unqueued_ = true;
    status.value_or_throw();
    return;
  }
  queued->wait(std::nullopt);
  operation = std::move(queued->operation());
}

Work OperationQueue::issue(Operation operation) {
  const auto issued = std::make_shared<Issued>(shared_from_this(), std::move(operation));
  std::unique_ptr<os::Thread> ended;
  {
    std::lock_guard lock(mutex_);
    if (refusal_) throw *refusal_;
    ended = start_thread(issued->operation().descriptor.kind);
    pending_.push_back(issued);
    issued->operation().number = ++num_issued_;
    if (!is_role_taken_) thread_.unpark();
  }
  if (ended != nullptr) ended->join();
  return Work(issued);
}

// Under the lock, so that close() finds either no thread or one to join.
std::unique_ptr<os::Thread> OperationQueue::start_thread(OpKind first) {
  try {
    return thread_.start([this] { run_thread(); });
  } catch (const Error& error) {
    throw error.with_context(format("{} was not issued", first));
  }
}

uint64_t OperationQueue::num_issued() const {
  std::lock_guard lock(mutex_);
  return num_issued_;
}

bool OperationQueue::is_idle() const {
  std::lock_guard lock(mutex_);
  return pending_.empty() && !is_role_taken_;
}

bool OperationQueue::has_pending() const {
  std::lock_guard lock(mutex_);
  return num_ended_ < num_issued_;
}

bool OperationQueue::try_take_role() {
  if (is_role_taken_ || pending_.empty()) return false;
  is_role_taken_ = true;
  return true;
}

Status OperationQueue::run_caught(Operation& operation) {
  try {
    return runner_.run(operation);
  } catch (const std::exception& thrown) {
    return error_of(thrown);
  }
}

void OperationQueue::run_front() {
  std::shared_ptr<Issued> front;
  {
    std::lock_guard lock(mutex_);
    if (pending_.empty()) return;  // close() has taken it out and completes it
    front = pending_.front();
    is_front_running_ = true;
  }
  Status status = run_caught(front->operation());
  front->release_owner();
  std::lock_guard lock(mutex_);
  front->complete(std::move(status));
  ++num_ended_;
  pending_.pop_front();
  is_front_running_ = false;
  for (os::Waiter* waiter : waiting_) waiter->unpark();
}

// Also when the holder unwinds: the operation that it ran is then close()'s to end.
void OperationQueue::release_role() {
  std::lock_guard lock(mutex_);
  is_role_taken_ = false;
  is_front_running_ = false;
  if (std::exchange(has_run_unqueued_, false)) ++num_ended_;
  wake_successors();
}

// If anything is left somebody must take the role; not every waiting caller may, so the thread is
// woken too.
void OperationQueue::wake_successors() {
  for (os::Waiter* waiter : waiting_) waiter->unpark();
  if (!pending_.empty()) thread_.unpark();
}

// A caller with a deadline of its own does not take the role: it could not leave an operation
// half-way.
void OperationQueue::wait_for(Issued& issued, std::optional<Deadline> deadline) {
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  const WaiterListing listing(mutex_, waiting_, *waiter);
  while (!issued.is_completed()) {
    bool has_role = false;
    if (!deadline) {
      std::lock_guard lock(mutex_);
      has_role = try_take_role();
    }
    if (has_role) {
      const HeldRole role(*this);
      while (!issued.is_completed()) run_front();
      return;
    }
    if (issued.is_completed()) return;
    if (deadline && deadline->has_passed(system_.now())) break;
    waiter->park(deadline.value_or(system_.deadline_in(kLookAgain)));
  }
  if (issued.is_completed()) return;
  const Operation& operation = issued.operation();
  throw Error(ErrorCode::kTimeout,
              format("waited for {} #{} until the deadline of the wait; the operation goes on",
                     operation.descriptor.to_string(), operation.number));
}

void OperationQueue::run_thread() {
  bool was_idle = false;
  while (true) {
    bool has_role = false;
    {
      std::lock_guard lock(mutex_);
      if (is_stopping_ || (was_idle && pending_.empty())) return thread_.note_end();
      has_role = try_take_role();
    }
    if (!has_role) {
      was_idle = !thread_.park();
      continue;
    }
    was_idle = false;
    const HeldRole role(*this);
    while (true) {
      run_front();
      std::lock_guard lock(mutex_);
      if (pending_.empty() || is_stopping_) break;
    }
  }
}

void OperationQueue::refuse(const Error& reason) {
  std::lock_guard lock(mutex_);
  if (!refusal_) refusal_ = reason;
}

bool OperationQueue::drain(Deadline deadline) {
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  const WaiterListing listing(mutex_, waiting_, *waiter);
  while (!is_idle()) {
    if (deadline.has_passed(system_.now())) return false;
    waiter->park(deadline);
  }
  return true;
}

void OperationQueue::close() {
  const Error closed(ErrorCode::kAborted, "the group is closed");
  std::unique_ptr<os::Thread> thread;
  {
    std::lock_guard lock(mutex_);
    is_stopping_ = true;
    if (!refusal_) refusal_ = closed;
    thread_.unpark();
    thread = thread_.take();
  }
  if (thread != nullptr) thread->join();
  // Each operation keeps this queue, so none may stay but the one that a waiting caller is running:
  // the caller completes it and takes it out.
  std::deque<std::shared_ptr<Issued>> left;
  {
    std::lock_guard lock(mutex_);
    const auto first = pending_.begin() + (is_front_running_ ? 1 : 0);
    left.assign(first, pending_.end());
    num_ended_ += left.size();
    pending_.erase(first, pending_.end());
  }
  for (const auto& issued : left) {
    issued->release_owner();
    issued->complete(closed);
  }
  std::lock_guard lock(mutex_);
  for (os::Waiter* waiter : waiting_) waiter->unpark();
}

}  // namespace cadre
