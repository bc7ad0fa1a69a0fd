#include "cadre/core/comm/queue/progress_queue.h"

#include <exception>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/waiter_listing.h"

namespace cadre {
namespace {

// The maximum sleep of a thread that waits. Every event that concerns it wakes it earlier.
constexpr Duration kLookAgain = std::chrono::seconds(60);

Error closed_error() {
  return Error(ErrorCode::kAborted, "the group is closed");
}

// The number of callbacks of operations that this thread runs, one inside the other. It is
// thread-local because a callback is a function of the program: it calls wait() of any Work and has
// no handle to the callback in which it runs. RunningCallback increments and decrements it.
thread_local int num_running_callbacks = 0;

class RunningCallback {
 public:
  RunningCallback() { ++num_running_callbacks; }
  ~RunningCallback() { --num_running_callbacks; }
  RunningCallback(const RunningCallback&) = delete;
  RunningCallback& operator=(const RunningCallback&) = delete;
};

// The innermost ProgressQueue::OnThread of this thread, whose type is not visible here. It is
// thread-local because a callback or a destructor asks whether it runs on a thread of a queue. The
// destructor of an OnThread restores the outer one.
thread_local const void* innermost_mark = nullptr;

std::exception_ptr exception_of(const Work::Callback& callback, const std::optional<Error>& error) {
  const RunningCallback running;
  try {
    callback(error);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

std::string text_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

std::string_view NamedCall::name() const {
  constexpr std::string_view kAsync = "_async";
  std::string_view blocking = call;
  if (blocking.ends_with(kAsync)) blocking.remove_suffix(kAsync.size());
  return blocking.empty() || blocking == to_string(kind) ? to_string(kind) : call;
}

std::string NamedCall::describe(uint64_t at) const {
  const std::string operation = format("{} #{}", kind, at);
  return name() == to_string(kind) ? operation : format("{} ({})", name(), operation);
}

Error NamedCall::renamed(const Error& error) const {
  ErrorDetails details = error.details();
  if (details.operation != to_string(kind) || !details.operation_number) return error;
  const uint64_t at = *details.operation_number;
  const std::string operation = format("{} #{} ", kind, at);
  const bool is_this = at >= number && at < number + num_numbers;
  if (!is_this || !error.message().starts_with(operation)) return error;
  details.operation = name();
  return Error(error.code(),
               format("{} {}", describe(at), error.message().substr(operation.size())))
      .with_details(std::move(details));
}

// A wait in a callback does not wait for callbacks. Otherwise a callback that waits for its own
// operation, or for an operation whose callback waits for this one, would deadlock.
bool IssuedOperation::is_settled() const {
  if (!is_completed()) return is_ordered_.load(std::memory_order_acquire);
  return have_callbacks_returned() || num_running_callbacks > 0;
}

std::string IssuedOperation::describe_on_group() const {
  const ForkGuard& group = *queue_->fork_guard_;
  return format("{} on group \"{}\", rank {}", named().describe(), group.group(), group.rank());
}

Error IssuedOperation::wait_timeout() const {
  const std::string problem =
      is_completed() ? "the operation has ended, but a callback of it still runs"
                     : "the operation has not ended; it goes on until its own deadline, and the "
                       "group is usable. Remedy: wait again, or abort() the group";
  ErrorDetails details;
  details.operation = named().name();
  details.operation_number = number_;
  details.group = queue_->fork_guard_->group();
  return Error(ErrorCode::kTimeout,
               format("{}: wait() has reached its deadline: {}", describe_on_group(), problem))
      .with_details(std::move(details));
}

void IssuedOperation::wait(std::optional<Deadline> deadline) {
  queue_->fork_guard_->check();
  if (!is_settled()) queue_->wait_for(*this, deadline);
  if (!is_completed()) {
    const Status ordered = order_current_stream();
    if (!ordered.ok()) throw named().renamed(ordered.error());
    return;
  }
  if (!status_.ok()) throw named().renamed(status_.error());
  if (have_callbacks_returned() && thrown_) std::rethrow_exception(thrown_);
}

std::optional<Error> IssuedOperation::error() const {
  if (!is_completed() || status_.ok()) return std::nullopt;
  return named().renamed(status_.error());
}

// A queue that is closed and idle may have outlived its System. No wait blocks then, so the value
// of the deadline does not matter.
Deadline IssuedOperation::deadline_in(Duration timeout) const {
  if (queue_->is_stopping_ && queue_->is_idle()) return Deadline(TimePoint());
  return queue_->system_.deadline_in(timeout);
}

void IssuedOperation::on_completed(Work::Callback callback) {
  queue_->fork_guard_->check();
  if (queue_->register_callback(*this, callback)) return;
  const RunningCallback running;
  callback(error());
}

// Starts the thread for callbacks. If it cannot be started, the caller of on_completed() gets the
// error, and not the thread that ends the operation.
bool ProgressQueue::register_callback(IssuedOperation& operation, Work::Callback& callback) {
  std::list<IssuedOperation::Call> call;
  std::unique_ptr<os::Thread> ended;
  {
    std::lock_guard lock(mutex_);
    if (operation.is_completed()) return false;
    if (!is_callback_thread_ending_) try {
        ended = callback_thread_.start([this] { run_callback_thread(); });
      } catch (const Error& error) {
        throw error.with_context(
            format("a callback of {} was not registered", operation.named().describe()));
      }
    call.push_back({operation.shared_from_this(), std::move(callback)});
    operation.callbacks_.splice(operation.callbacks_.end(), call);
    ++operation.num_callbacks_left_;
    ++num_registered_;
  }
  if (ended != nullptr) ended->join();
  return true;
}

ProgressQueue::OnThread::OnThread(const ProgressQueue& queue) noexcept
    : queue_(queue), outer_(static_cast<const OnThread*>(innermost_mark)) {
  innermost_mark = this;
}

ProgressQueue::OnThread::~OnThread() {
  innermost_mark = outer_;
}

bool ProgressQueue::is_on_this_thread() const {
  for (auto* mark = static_cast<const OnThread*>(innermost_mark); mark; mark = mark->outer_) {
    if (&mark->queue_ == this) return true;
  }
  return false;
}

bool ProgressQueue::is_any_on_this_thread() {
  return innermost_mark != nullptr;
}

ProgressQueue::AwaitsOther::AwaitsOther() noexcept {
  for (auto* mark = static_cast<const OnThread*>(innermost_mark); mark; mark = mark->outer_) {
    mark->queue_.num_awaiting_other_.fetch_add(1, std::memory_order_seq_cst);
  }
}

ProgressQueue::AwaitsOther::~AwaitsOther() {
  for (auto* mark = static_cast<const OnThread*>(innermost_mark); mark; mark = mark->outer_) {
    mark->queue_.num_awaiting_other_.fetch_sub(1, std::memory_order_seq_cst);
  }
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
        throw error.with_context(format("{} was not issued", operations.front()->named().name()));
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

void ProgressQueue::await_start(const IssuedOperation& operation) {
  const auto has_started = [&] {
    std::lock_guard lock(mutex_);
    return operation.is_completed() || operation.stage_ == IssuedOperation::Stage::kEnqueued;
  };
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  const WaiterListing listing(mutex_, waiting_, *waiter);
  while (!has_started()) {
    if (!try_advance(&operation)) waiter->park(system_.deadline_in(kLookAgain));
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
  if (is_stopping_) return true;
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

// The engine may end the operation before this function has recorded that it is enqueued.
void ProgressQueue::enqueue(IssuedOperation& oldest, const Completion& completion) {
  completion.on_done([this, kept = oldest.shared_from_this()](const Status& status) {
    const OnThread on_thread(*this);
    end(*kept, status);
    run_callbacks_after_close();
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
    num_registered_ -= operation.callbacks_.size();
    calls_.splice(calls_.end(), operation.callbacks_);
    callback_thread_.unpark();
  }
  wake_waiting();
}

bool ProgressQueue::run_next_callback() {
  std::list<IssuedOperation::Call> next;
  {
    std::lock_guard lock(mutex_);
    if (calls_.empty()) return false;
    next.splice(next.begin(), calls_, calls_.begin());
    ++num_calling_;
  }
  const OnThread on_thread(*this);
  const auto operation = next.front().operation;  // the handle keeps this queue alive
  const std::exception_ptr thrown = exception_of(next.front().callback, operation->error());
  next.clear();
  if (thrown) log_thrown(*operation, thrown);
  std::lock_guard lock(mutex_);
  if (!operation->thrown_) operation->thrown_ = thrown;
  operation->num_callbacks_left_.fetch_sub(1, std::memory_order_release);
  --num_calling_;
  wake_waiting();
  return true;
}

void ProgressQueue::run_callback_thread() {
  bool was_idle = false;
  while (true) {
    {
      std::lock_guard lock(mutex_);
      const bool is_needed = num_registered_ > 0 && !is_callback_thread_ending_;
      if (calls_.empty() && !is_needed && (was_idle || is_callback_thread_ending_)) {
        return callback_thread_.note_end();
      }
    }
    was_idle = !run_next_callback() && !callback_thread_.park();
  }
}

void ProgressQueue::run_callbacks_after_close() {
  if (!is_stopping_) return;
  const auto kept = shared_from_this();  // a callback may be the last owner of an operation
  {
    std::lock_guard lock(mutex_);
    if (!is_callback_thread_ending_) return;
  }
  while (run_next_callback()) {
  }
}

void ProgressQueue::log_thrown(const IssuedOperation& operation,
                               const std::exception_ptr& thrown) const {
  if (log_ == nullptr) return;
  log_->write(LogLevel::kError, "comm",
              format("{}: a callback threw, which Work::wait() throws again: {}",
                     operation.describe_on_group(), text_of(thrown)));
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
  return true;
}

// Releases the progress role. If operations are left, another thread must take the role. A caller
// that waits with a deadline may not, so the queue's own thread is woken, too. After close() the
// holder of the role ends the operations that are left.
void ProgressQueue::release_role() {
  if (is_stopping_) end_all(closed_error());
  {
    std::lock_guard lock(mutex_);
    is_role_taken_ = false;
    is_oldest_begun_ = false;
    if (std::exchange(has_ended_alone_, false)) --num_pending_;
    wake_waiting();
    if (needs_progress()) thread_.unpark();
  }
  run_callbacks_after_close();
}

void ProgressQueue::wake_waiting() {
  for (os::Waiter* waiter : waiting_) waiter->unpark();
}

void ProgressQueue::wait_for(const IssuedOperation& operation, std::optional<Deadline> deadline) {
  if (!deadline && try_advance(&operation) && operation.is_settled()) return;
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  const WaiterListing listing(mutex_, waiting_, *waiter);
  while (!operation.is_settled()) {
    // An operation that has ended needs no progress: this caller only waits for its callbacks,
    // which another thread runs.
    if (!deadline && !operation.need_not_wait() && try_advance(&operation)) continue;
    if (operation.is_settled()) return;
    if (deadline && deadline->has_passed(system_.now())) {
      if (operation.error()) return;  // wait() throws this error and does not wait for callbacks
      throw operation.wait_timeout();
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
  // Each operation keeps this queue alive, so all are removed, except an operation that a waiting
  // caller runs. That caller ends it when it releases the role.
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
  end_callback_thread();
}

void ProgressQueue::end_callback_thread() {
  std::unique_ptr<os::Thread> thread;
  {
    std::lock_guard lock(mutex_);
    is_callback_thread_ending_ = true;
    callback_thread_.unpark();
    thread = callback_thread_.take();
  }
  if (thread != nullptr) thread->join();
}

}  // namespace cadre
