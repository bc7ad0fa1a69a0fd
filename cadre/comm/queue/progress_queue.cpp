#include "cadre/comm/queue/progress_queue.h"

#include <utility>

#include "cadre/base/format.h"
#include "cadre/comm/queue/waiter_listing.h"

namespace cadre {
namespace {

// An upper bound for a sleep: every change wakes the sleeper.
constexpr Duration kLookAgain = std::chrono::seconds(60);

Error closed_error() {
  return Error(ErrorCode::kAborted, "the group is closed");
}

}  // namespace

void IssuedOperation::wait(std::optional<Deadline> deadline) {
  queue_->fork_guard_->check();
  if (!is_completed()) queue_->wait_for(*this, deadline);
  status_.value_or_throw();
}

std::optional<Error> IssuedOperation::error() const {
  if (!is_completed() || status_.ok()) return std::nullopt;
  return status_.error();
}

uint64_t ProgressQueue::num_issued() const {
  std::lock_guard lock(mutex_);
  return num_issued_;
}

bool ProgressQueue::is_idle() const {
  std::lock_guard lock(mutex_);
  return !needs_progress() && !is_role_taken_;
}

bool ProgressQueue::has_pending() const {
  std::lock_guard lock(mutex_);
  return num_ended_ < num_issued_;
}

void ProgressQueue::refuse(const Error& reason) {
  std::lock_guard lock(mutex_);
  if (!refusal_) refusal_ = reason;
}

// The thread is started under the lock, so that close() finds either no thread or one to join.
void ProgressQueue::post(std::span<const Handle> operations, MovedBy moved_by) {
  std::unique_ptr<os::Thread> ended;
  {
    std::lock_guard lock(mutex_);
    if (refusal_) throw *refusal_;
    if (moved_by == MovedBy::kThread) try {
        ended = thread_.start([this] { run_thread(); });
      } catch (const Error& error) {
        throw error.with_context(format("{} was not issued", operations.front()->describe()));
      }
    append(operations);
    if (is_role_taken_) {
      wake_holder();
    } else if (moved_by == MovedBy::kThread) {
      thread_.unpark();
    }
  }
  if (ended != nullptr) ended->join();
}

void ProgressQueue::append(std::span<const Handle> operations) {
  const size_t num_before = posted_.size();
  try {
    for (const Handle& operation : operations) posted_.push_back(operation);
  } catch (...) {
    posted_.resize(num_before);
    throw;
  }
  for (const Handle& operation : operations) operation->number_ = ++num_issued_;
}

bool ProgressQueue::try_begin_alone(uint64_t& number) {
  std::lock_guard lock(mutex_);
  if (refusal_) throw *refusal_;
  if (is_role_taken_ || needs_progress()) return false;
  is_role_taken_ = true;
  number = ++num_issued_;
  return true;
}

bool ProgressQueue::is_over(const IssuedOperation* until) const {
  if (is_stopping_) return true;
  if (until != nullptr) return until->is_completed();
  std::lock_guard lock(mutex_);
  return !needs_progress();
}

ProgressQueue::Handle ProgressQueue::begin_oldest() {
  std::lock_guard lock(mutex_);
  if (posted_.empty()) return nullptr;
  is_oldest_begun_ = true;
  return posted_.front();
}

void ProgressQueue::start_moving(IssuedOperation& oldest) {
  std::lock_guard lock(mutex_);
  oldest.stage_ = IssuedOperation::Stage::kMoving;
  ++num_moving_;
  posted_.pop_front();
  is_oldest_begun_ = false;
}

// The owner is released without the lock, since its deleter may use the queue, and before the
// operation is completed, so that a caller whose wait has ended finds it released.
void ProgressQueue::end(IssuedOperation& operation, Status status) {
  if (operation.is_completed()) return;
  operation.keep_alive_.reset();
  std::lock_guard lock(mutex_);
  operation.status_ = std::move(status);
  operation.is_completed_.store(true, std::memory_order_release);
  ++num_ended_;
  if (operation.stage_ == IssuedOperation::Stage::kMoving) {
    --num_moving_;
  } else if (!posted_.empty() && posted_.front().get() == &operation) {
    posted_.pop_front();
    is_oldest_begun_ = false;
  }
  wake_waiting();
}

void ProgressQueue::end_all(const Error& error) {
  end_moving(error);
  while (const Handle oldest = begin_oldest()) end(*oldest, error);
}

bool ProgressQueue::try_advance(const IssuedOperation* until) {
  {
    std::lock_guard lock(mutex_);
    if (is_role_taken_ || !needs_progress()) return false;
    is_role_taken_ = true;
  }
  const HeldRole role(*this);
  advance(until);
  return true;
}

// If anything is left another thread must take the role; not every waiting caller may, so the
// queue's own is woken too. After a close() the holder ends what is left.
void ProgressQueue::release_role() {
  if (is_stopping_) end_all(closed_error());
  std::lock_guard lock(mutex_);
  is_role_taken_ = false;
  is_oldest_begun_ = false;
  if (std::exchange(has_ended_alone_, false)) ++num_ended_;
  wake_waiting();
  if (needs_progress()) thread_.unpark();
}

void ProgressQueue::wake_waiting() {
  for (os::Waiter* waiter : waiting_) waiter->unpark();
}

void ProgressQueue::wait_for(const IssuedOperation& operation, std::optional<Deadline> deadline) {
  if (!deadline && try_advance(&operation) && operation.is_completed()) return;
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  const WaiterListing listing(mutex_, waiting_, *waiter);
  while (!operation.is_completed()) {
    if (!deadline && try_advance(&operation)) continue;
    if (operation.is_completed()) return;
    if (deadline && deadline->has_passed(system_.now())) {
      throw Error(ErrorCode::kTimeout,
                  format("waited for {} #{} until the deadline of the wait; the operation goes on",
                         operation.describe(), operation.number()));
    }
    waiter->park(deadline.value_or(system_.deadline_in(kLookAgain)));
  }
}

void ProgressQueue::run_thread() {
  bool was_idle = false;
  while (true) {
    {
      std::lock_guard lock(mutex_);
      if (is_stopping_ || (was_idle && !needs_progress())) return thread_.note_end();
    }
    was_idle = !try_advance(nullptr) && !thread_.park();
  }
}

bool ProgressQueue::drain(Deadline deadline) {
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  const WaiterListing listing(mutex_, waiting_, *waiter);
  while (!is_idle()) {
    if (deadline.has_passed(system_.now())) return false;
    waiter->park(deadline);
  }
  return true;
}

void ProgressQueue::close() {
  std::unique_ptr<os::Thread> thread;
  {
    std::lock_guard lock(mutex_);
    is_stopping_ = true;
    if (!refusal_) refusal_ = closed_error();
    if (is_role_taken_) wake_holder();
    thread_.unpark();
    thread = thread_.take();
  }
  if (thread != nullptr) thread->join();
  // Each operation keeps this queue, so none may stay but those that a waiting caller moves: it
  // ends them when it gives the role back.
  std::vector<Handle> left;
  bool takes_role = false;
  {
    std::lock_guard lock(mutex_);
    const auto first = posted_.begin() + (is_oldest_begun_ ? 1 : 0);
    left.assign(first, posted_.end());
    posted_.erase(first, posted_.end());
    takes_role = !std::exchange(is_role_taken_, true);
  }
  for (const Handle& operation : left) end(*operation, closed_error());
  if (takes_role) release_role();
}

}  // namespace cadre
