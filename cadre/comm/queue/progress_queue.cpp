#include "cadre/comm/queue/progress_queue.h"

#include <exception>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/comm/queue/thrown_error.h"
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
  if (!need_not_wait()) queue_->wait_for(*this, deadline);
  (is_completed() ? status_ : order_streams()).value_or_throw();
}

std::optional<Error> IssuedOperation::error() const {
  if (!is_completed() || status_.ok()) return std::nullopt;
  return status_.error();
}

Deadline IssuedOperation::deadline_in(Duration timeout) const {
  return queue_->system_.deadline_in(timeout);
}

void IssuedOperation::on_completed(Work::Callback callback) {
  queue_->fork_guard_->check();
  std::list<Call> call;
  call.push_back({shared_from_this(), std::move(callback)});
  {
    std::lock_guard lock(queue_->mutex_);
    if (!is_completed()) return callbacks_.splice(callbacks_.end(), call);
  }
  call.front().callback(error());
}

uint64_t ProgressQueue::num_issued() const {
  std::lock_guard lock(mutex_);
  return num_issued_;
}

bool ProgressQueue::is_idle() const {
  std::lock_guard lock(mutex_);
  return num_pending_ == 0 && !is_role_taken_ && calls_.empty() && num_calling_ == 0;
}

bool ProgressQueue::has_pending() const {
  std::lock_guard lock(mutex_);
  return num_pending_ > 0;
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
  num_pending_ += operations.size();
  for (const Handle& operation : operations) {
    operation->number_ = num_issued_ + 1;
    num_issued_ += operation->num_numbers();
  }
}

std::optional<uint64_t> ProgressQueue::try_begin_alone(size_t num_numbers) {
  std::lock_guard lock(mutex_);
  if (refusal_) throw *refusal_;
  if (is_role_taken_ || needs_progress()) return std::nullopt;
  is_role_taken_ = true;
  ++num_pending_;
  return std::exchange(num_issued_, num_issued_ + num_numbers) + 1;
}

bool ProgressQueue::is_over(const IssuedOperation* until) const {
  if (is_stopping_ || has_calls_) return true;
  if (until != nullptr) return until->need_not_wait();
  std::lock_guard lock(mutex_);
  return !needs_progress();
}

ProgressQueue::Handle ProgressQueue::begin_oldest() {
  std::lock_guard lock(mutex_);
  if (posted_.empty()) return nullptr;
  is_oldest_begun_ = true;
  return posted_.front();
}

void ProgressQueue::remove_oldest() {
  posted_.pop_front();
  is_oldest_begun_ = false;
}

void ProgressQueue::start_moving(IssuedOperation& oldest) {
  std::lock_guard lock(mutex_);
  oldest.stage_ = IssuedOperation::Stage::kMoving;
  ++num_moving_;
  remove_oldest();
}

void ProgressQueue::enqueue_alone(IssuedOperation& operation, uint64_t number,
                                  const Completion& completion) {
  operation.number_ = number;
  enqueue(operation, completion);
}

// The engine may end the operation before this function has noted that it is enqueued. Its
// callbacks are then the holder's, who still has the role here.
void ProgressQueue::enqueue(IssuedOperation& oldest, const Completion& completion) {
  completion.on_done([this, kept = oldest.shared_from_this()](const Status& status) {
    end(*kept, status);
    if (kept->stage_ == IssuedOperation::Stage::kEnqueued) run_callbacks();
  });
  std::lock_guard lock(mutex_);
  if (oldest.is_completed()) return;
  oldest.stage_ = IssuedOperation::Stage::kEnqueued;
  if (!posted_.empty() && posted_.front().get() == &oldest) remove_oldest();
  oldest.is_ordered_.store(completion.is_stream_ordered(), std::memory_order_release);
  wake_waiting();
}

// The owner is released without the lock, since its deleter may use the queue, and before the
// operation is completed, so that a caller whose wait has ended finds it released.
void ProgressQueue::end(IssuedOperation& operation, Status status) {
  if (operation.is_completed()) return;
  operation.keep_alive_.reset();
  std::lock_guard lock(mutex_);
  operation.status_ = std::move(status);
  operation.is_completed_.store(true, std::memory_order_release);
  --num_pending_;
  if (operation.stage_ == IssuedOperation::Stage::kMoving) {
    --num_moving_;
  } else if (!posted_.empty() && posted_.front().get() == &operation) {
    remove_oldest();
  }
  if (!operation.callbacks_.empty()) {
    calls_.splice(calls_.end(), operation.callbacks_);
    has_calls_ = true;
  }
  wake_waiting();
}

void ProgressQueue::call_back() {
  const auto kept = shared_from_this();  // a callback may be the last owner of an operation
  while (true) {
    std::list<IssuedOperation::Call> next;
    {
      std::lock_guard lock(mutex_);
      if (calls_.empty()) return;
      next.splice(next.begin(), calls_, calls_.begin());
      has_calls_ = !calls_.empty();
      ++num_calling_;
    }
    try {
      next.front().callback(next.front().operation->error());
    } catch (const std::exception& thrown) {
      fail(error_of(thrown).with_context(format("a callback of {} #{} threw",
                                                next.front().operation->describe(),
                                                next.front().operation->number())));
    }
    next.clear();
    std::lock_guard lock(mutex_);
    --num_calling_;
    wake_waiting();
  }
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
  {
    const HeldRole role(*this);
    advance(until);
  }
  run_callbacks();
  return true;
}

// If anything is left another thread must take the role; not every waiting caller may, so the
// queue's own is woken too. After a close() the holder ends what is left.
void ProgressQueue::release_role() {
  if (is_stopping_) end_all(closed_error());
  std::lock_guard lock(mutex_);
  is_role_taken_ = false;
  is_oldest_begun_ = false;
  if (std::exchange(has_ended_alone_, false)) --num_pending_;
  wake_waiting();
  if (needs_progress()) thread_.unpark();
}

void ProgressQueue::wake_waiting() {
  for (os::Waiter* waiter : waiting_) waiter->unpark();
}

void ProgressQueue::wait_for(const IssuedOperation& operation, std::optional<Deadline> deadline) {
  if (!deadline && try_advance(&operation) && operation.need_not_wait()) return;
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  const WaiterListing listing(mutex_, waiting_, *waiter);
  while (!operation.need_not_wait()) {
    if (!deadline && try_advance(&operation)) continue;
    if (operation.need_not_wait()) return;
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
  run_callbacks();
}

}  // namespace cadre
