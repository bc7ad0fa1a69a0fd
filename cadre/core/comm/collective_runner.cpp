#include "cadre/core/comm/collective_runner.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/scale.h"
#include "cadre/core/comm/queue/thrown_error.h"

namespace cadre {
namespace {

// How long a rank that has found a mismatch waits for a rank that may report a lower pair of ranks.
constexpr Duration kSecondOpinionTime = std::chrono::milliseconds(50);
constexpr const char* kEnqueuedPhase = "enqueued";

}  // namespace

// Publishes the collectives of a call, one after the other, in this rank's cell of the status page
// and in the flight record.
class CollectiveRunner::Record final : public OpProgress::Observer {
 public:
  Record(CollectiveRunner& runner, const Operation& operation, TimePoint now)
      : runner_(runner), operation_(operation) {
    begin(0, now);
  }

  void on_next(size_t index) override {
    const TimePoint now = runner_.parts_.system.now();
    end({.now = now});
    begin(index, now);
  }
  void end(const FlightRecorder::Ending& ending) {
    if (is_hidden_) {
      runner_.end_hidden(number_, ending);
    } else if (cell_.number.load(std::memory_order_relaxed) == number_) {
      cell_.end(ending.well, ending.now);
    }
    runner_.parts_.recorder.end(entry_, ending);
  }
  uint64_t entry() const { return entry_; }

 private:
  void begin(size_t index, TimePoint now) {
    const Fingerprint& fingerprint = operation_.fingerprints[index];
    number_ = operation_.number + index;
    // While calls are enqueued, the cell shows the oldest of them, because it is most likely to be
    // blocked. Only this thread enqueues calls, so the number does not grow meanwhile.
    is_hidden_ = runner_.num_enqueued_ > 0;
    if (is_hidden_) {
      runner_.hide({number_, fingerprint, now, std::nullopt});
    } else {
      cell_.begin(number_, fingerprint, now);
    }
    entry_ = runner_.parts_.recorder.begin(number_, fingerprint, -1, now);
    runner_.parts_.monitor.enter_collective(number_);
  }

  CollectiveRunner& runner_;
  const Operation& operation_;
  ActivityCell& cell_ = runner_.parts_.monitor.own_cell().collective;
  uint64_t number_ = 0;
  uint64_t entry_ = 0;
  bool is_hidden_ = false;
};

// Shows the call in the cell as soon as no enqueued call is left.
void CollectiveRunner::hide(const Hidden& call) {
  const std::lock_guard lock(mutex_);
  hidden_ = call;
  if (enqueued_.empty()) show_hidden();
}

void CollectiveRunner::end_hidden(uint64_t number, const FlightRecorder::Ending& ending) {
  const std::lock_guard lock(mutex_);
  if (hidden_ && hidden_->number == number) {
    hidden_->ending = ending;
    return;
  }
  ActivityCell& cell = parts_.monitor.own_cell().collective;
  if (cell.number.load(std::memory_order_relaxed) == number) cell.end(ending.well, ending.now);
}

// REQUIRES: the mutex is locked.
void CollectiveRunner::show_hidden() {
  if (!hidden_) return;
  ActivityCell& cell = parts_.monitor.own_cell().collective;
  const OpProgress progress(&cell.progress);  // the call reports its own progress to no cell
  cell.begin(hidden_->number, hidden_->fingerprint, hidden_->began);
  if (hidden_->ending) cell.end(hidden_->ending->well, hidden_->ending->now);
  hidden_.reset();
}

// A call that the engine has enqueued and ends later. The engine's Completion owns this object and
// through it the memory of the call, even after the group has abandoned the call.
struct CollectiveRunner::Enqueued {
  uint64_t number;
  std::vector<Fingerprint> fingerprints;
  Deadline deadline;
  TimePoint began;
  std::vector<uint64_t> entries;  // the indices in the flight record
  std::vector<std::byte> scaled;  // the scaled inputs, which the engine reads
  std::shared_ptr<const void> keep_alive;
  const Backend* engine;  // used only as long as the runner exists, like its capabilities
  const Capabilities* can;
  Completion result;
  std::atomic<bool> has_ended{false};

  // Returns true for the first caller only, which must end the call. Callers are the engine, and
  // the watch thread, which abandons the call.
  bool claim_end() { return !has_ended.exchange(true); }
};

Completion CollectiveRunner::run(Operation& operation) {
  Monitor& monitor = parts_.monitor;
  if (monitor.has_failed()) return monitor.error();
  // The cell of the status page shows the progress of this call, unless it already shows an
  // enqueued call.
  OpProgress progress(num_enqueued_ == 0 ? &monitor.own_cell().collective.progress : nullptr);
  const TimePoint began = parts_.system.now();
  Record record(*this, operation, began);
  if (operation.fingerprints.size() > 1) progress.observe_with(&record);
  const Running call{{operation.number, operation.fingerprints,
                      operation.deadline.value_or(Deadline(began + parts_.timeout)), progress},
                     began};
  Completion result =
      monitor.has_failed() ? Completion(monitor.error()) : execute_caught(operation, call);
  const bool is_done = result.is_done();
  // An engine that only enqueues may have ended all collectives of the call without a report.
  const size_t last = operation.fingerprints.size() - 1;
  if (is_done && result.status().ok() && progress.index() < last) progress.set_index(last);
  if (!is_done) {
    result = follow(operation, call, result, record.entry());
  } else if (!result.status().ok()) {
    result = conclude(call, result.status());
  }
  if (is_watched(operation)) end_submission();
  if (num_enqueued_ == 0) monitor.leave_collective();
  const TimePoint now = parts_.system.now();
  if (is_done) {
    record.end({result.status().ok(), waiting_for(progress), progress.phase(), now});
  }
  // Only the holder of the progress role writes this counter.
  time_spent_ns_.store((time_spent() + (now - began)).count(), std::memory_order_relaxed);
  return result;
}

// Runs a call. If the engine throws, the exception becomes the failure of the group. This rank is
// the culprit, because its peers have done nothing wrong.
Completion CollectiveRunner::execute_caught(Operation& operation, const Running& call) {
  try {
    if (is_watched(operation)) begin_watch(call);
    if (operation.collectives.empty()) return allocate(operation, call.context);
    return execute(operation.collectives, call.context);
  } catch (const std::exception& thrown) {
    const Error error = error_of(thrown);
    fail(call.at_failed(), {error.code(), parts_.monitor.roster().self.value, error.message(), {}});
    return error;
  }
}

Completion CollectiveRunner::execute(std::span<const Collective> collectives,
                                     const OpContext& context) {
  Backend* const engine = parts_.engines.engine_for(collectives.front().device.type);
  std::vector<Collective> sums;
  if (std::ranges::any_of(collectives,
                          [this](const Collective& c) { return is_to_be_scaled(c); })) {
    CADRE_RETURN_IF_ERROR(await_enqueued(engine, context.deadline));
    sums = premultiplied(collectives);
    collectives = sums;
  }
  if (engine != nullptr) return engine->submit(context, collectives);
  return run_in_order(context, collectives, [](const OpContext&, const Collective& collective) {
    const auto& [in, out] = std::pair(collective.in, collective.out);
    if (in.data() != out.data() && !out.empty()) std::memmove(out.data(), in.data(), out.size());
    return Status();
  });
}

const Capabilities& CollectiveRunner::capabilities_for(const Operation& operation) const {
  return parts_.engines.capabilities_for(operation.device_type());
}

// Returns whether the engine may leave the call behind, so that another thread must end it at its
// deadline.
bool CollectiveRunner::is_watched(const Operation& operation) const {
  const Capabilities& can = capabilities_for(operation);
  return !can.is_abortable || can.is_stream_ordered;
}

bool CollectiveRunner::is_to_be_scaled(const Collective& collective) const {
  const Capabilities& can = parts_.engines.capabilities_for(collective.device.type);
  return reduces(collective.kind) &&
         can.needs_multiplied_inputs(collective.dtype, collective.reduction.op());
}

// Turns each PREMUL_SUM into a SUM of scaled inputs. A scaled input is stored in the output if the
// output is large enough. Messages and the comparison between ranks still show a PREMUL_SUM,
// because the fingerprint does not change.
std::vector<Collective> CollectiveRunner::premultiplied(std::span<const Collective> collectives) {
  const auto is_in_place = [](const Collective& c) { return c.out.size() == c.in.size(); };
  size_t num_scaled_bytes = 0;
  for (const Collective& collective : collectives) {
    if (!is_to_be_scaled(collective) || is_in_place(collective)) continue;
    num_scaled_bytes += collective.in.size();
  }
  if (scaled_.size() < num_scaled_bytes) scaled_.resize(num_scaled_bytes);
  std::vector<Collective> sums(collectives.begin(), collectives.end());
  std::byte* free = scaled_.data();
  for (Collective& collective : sums) {
    if (!is_to_be_scaled(collective)) continue;
    const size_t num_bytes = collective.in.size();
    std::byte* const scaled =
        is_in_place(collective) ? collective.out.data() : std::exchange(free, free + num_bytes);
    scale(scaled, collective.in.data(), num_bytes / size_of(collective.dtype), collective.dtype,
          *collective.reduction.factor());
    collective.in = {scaled, num_bytes};
    collective.reduction = ReduceOp::kSum;
  }
  return sums;
}

Status CollectiveRunner::allocate(Operation& operation, const OpContext& context) {
  const auto await_exchange = [&](const Completion& exchange, std::shared_ptr<const void> memory) {
    return await(exchange, std::move(memory), context.deadline);
  };
  auto buffer = parts_.heap->allocate(
      context, OpDescriptor::from_fingerprint(context.fingerprint()).count, await_exchange);
  if (!buffer.ok()) return buffer.error();
  operation.allocated = std::move(buffer).value();
  return {};
}

Status CollectiveRunner::wait_for_end(const Completion& completion, Deadline deadline) {
  const std::shared_ptr<os::Waiter> waiter = parts_.system.make_waiter();
  completion.on_done([waiter](const Status&) { waiter->unpark(); });
  while (!completion.is_done()) {
    if (parts_.monitor.has_failed()) return parts_.monitor.error();
    if (deadline.has_passed(parts_.system.now())) {
      return Error(ErrorCode::kTimeout,
                   "the engine did not complete the operation before its deadline");
    }
    waiter->park(deadline.earlier(parts_.system.deadline_in(kWatchTime)));
  }
  return {};
}

// Waits until the engine has ended the call. Even if this wait ends earlier, the engine keeps the
// memory until then.
Status CollectiveRunner::await(const Completion& completion, std::shared_ptr<const void> memory,
                               Deadline deadline) {
  if (completion.is_done()) return completion.status();
  const std::weak_ptr<const void> left = memory;
  completion.on_done([kept = std::move(memory)](const Status&) {});
  const Status waited = wait_for_end(completion, deadline);
  if (waited.ok()) return completion.status();
  const std::lock_guard lock(mutex_);
  abandoned_.push_back(left);
  return waited;
}

// Waits until the calls that the engine has enqueued have ended: the input of the next call may be
// the result of one of them.
Status CollectiveRunner::await_enqueued(const Backend* engine, Deadline deadline) {
  while (true) {
    Completion last = Status();
    {
      const std::lock_guard lock(mutex_);
      const auto found = std::find_if(enqueued_.rbegin(), enqueued_.rend(),
                                      [&](const auto& call) { return call->engine == engine; });
      if (found == enqueued_.rend()) return {};
      last = (*found)->result;
    }
    CADRE_RETURN_IF_ERROR(wait_for_end(last, deadline));
    if (!last.status().ok()) return last.status();
  }
}

Status CollectiveRunner::conclude(const Running& call, const Status& status) {
  if (status.ok()) return {};
  if (!parts_.monitor.has_failed()) {
    explain(call.at_failed(), status.error());
    static_cast<void>(parts_.monitor.published_failure());
  }
  return parts_.monitor.error();
}

Completion CollectiveRunner::follow(const Operation& operation, const Running& call,
                                    const Completion& completion, uint64_t first_entry) {
  const auto& [number, fingerprints, deadline, progress] = call.context;
  const auto enqueued = std::make_shared<Enqueued>(
      number, std::vector<Fingerprint>(fingerprints.begin(), fingerprints.end()), deadline,
      call.began, std::vector<uint64_t>{first_entry}, std::exchange(scaled_, {}),
      operation.keep_alive, parts_.engines.engine_for(operation.device_type()),
      &capabilities_for(operation), Completion::make_pending(completion.end()));
  for (size_t i = 1; i < fingerprints.size(); ++i) {
    enqueued->entries.push_back(parts_.recorder.begin(number + i, fingerprints[i], -1, call.began));
  }
  parts_.monitor.enter_collective(number + fingerprints.size() - 1);
  {
    std::lock_guard lock(mutex_);
    enqueued_.push_back(enqueued);
    num_enqueued_ = enqueued_.size();
    hidden_.reset();  // it is this call, or an earlier one that has ended
    if (enqueued_.size() == 1) show(*enqueued);
    watch_.unpark();
  }
  // The runner may already be destroyed when the engine ends a call that was abandoned.
  completion.on_done([this, enqueued](const Status& status) {
    if (!enqueued->claim_end()) return;
    const Status result = end_enqueued(enqueued, status);
    // The queue also holds the memory, and releases it last: a deleter of the program may close a
    // group, which would wait for this thread of the engine.
    enqueued->keep_alive.reset();
    enqueued->result.complete(result);
  });
  return enqueued->result;
}

// Reports no progress, because the progress that submit() has recorded is out of date when the
// engine ends the call.
Status CollectiveRunner::end_enqueued(const std::shared_ptr<Enqueued>& call, const Status& status) {
  OpProgress progress;
  const Status result =
      conclude({{call->number, call->fingerprints, call->deadline, progress}, call->began}, status);
  const TimePoint now = parts_.system.now();
  for (const uint64_t entry : call->entries) {
    parts_.recorder.end(entry, {result.ok(), -1, kEnqueuedPhase, now});
  }
  std::lock_guard lock(mutex_);
  const bool was_shown = enqueued_.front() == call;
  std::erase(enqueued_, call);
  if (was_shown) {
    ActivityCell& cell = parts_.monitor.own_cell().collective;
    // Ranks that leave compare their last calls, so the cell shows the last one of those coalesced.
    if (result.ok()) {
      cell.begin(call->number + call->fingerprints.size() - 1, call->fingerprints.back(),
                 call->began);
    }
    cell.end(result.ok(), now);
    if (result.ok() && !enqueued_.empty()) show(*enqueued_.front());
  }
  const bool runs_another = hidden_ && !hidden_->ending;
  if (result.ok() && enqueued_.empty()) show_hidden();
  if (enqueued_.empty() && !runs_another) parts_.monitor.leave_collective();
  num_enqueued_ = enqueued_.size();
  return result;
}

void CollectiveRunner::begin_watch(const Running& call) {
  std::unique_ptr<os::Thread> ended;
  {
    const std::lock_guard lock(mutex_);
    ended = watch_.start([this] { watch(); });
    submitted_ = LateCall{call.context.number, call.context.fingerprint(), call.context.deadline,
                          call.began};
  }
  if (ended != nullptr) ended->join();
}

void CollectiveRunner::end_submission() {
  const std::lock_guard lock(mutex_);
  submitted_.reset();
}

void CollectiveRunner::watch() {
  bool was_idle = false;
  std::optional<TimePoint> failed_at;
  Comparison comparison;
  while (true) {
    Deadline next_look = parts_.system.deadline_in(kWatchTime);
    bool is_needed = false;
    {
      const std::lock_guard lock(mutex_);
      is_needed = submitted_ || !enqueued_.empty();
      if (is_stopping_ || (was_idle && !is_needed)) return watch_.note_end();
      for (const auto& call : enqueued_) next_look = next_look.earlier(call->deadline);
    }
    was_idle = !is_needed && !watch_.park();
    if (!is_needed) continue;
    parts_.monitor.await_failure(-1, next_look);
    fail_overdue();
    compare_late(comparison);
    if (!parts_.monitor.has_failed()) continue;
    const TimePoint now = parts_.system.now();
    if (!failed_at) failed_at = now;
    abandon_enqueued(now - *failed_at);
    // What is left are calls that an engine which can abort them is about to end.
    static_cast<void>(watch_.park(kWatchTime));
  }
}

void CollectiveRunner::fail_overdue() {
  const TimePoint now = parts_.system.now();
  std::shared_ptr<Enqueued> overdue;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find_if(
        enqueued_, [now](const auto& call) { return call->deadline.has_passed(now); });
    if (found != enqueued_.end()) overdue = *found;
  }
  if (overdue == nullptr) return;
  OpProgress progress;
  static_cast<void>(conclude(
      {{overdue->number, overdue->fingerprints, overdue->deadline, progress}, overdue->began},
      Error(ErrorCode::kTimeout, "the engine has not ended the operation until its deadline")));
}

// Returns the oldest call that has not ended: an enqueued one, or the one whose submit() has not
// returned, because the engine may need its peers in order to enqueue.
std::optional<CollectiveRunner::LateCall> CollectiveRunner::oldest_call() const {
  const std::lock_guard lock(mutex_);
  if (enqueued_.empty()) return submitted_;
  const Enqueued& first = *enqueued_.front();
  return LateCall{first.number, first.fingerprints.front(), first.deadline, first.began};
}

// Engines that enqueue do not compare calls. Ranks that make different calls may wait for each
// other, so a call is compared when it has been the oldest one for 1, 2, 4, ... s.
void CollectiveRunner::compare_late(Comparison& comparison) {
  const TimePoint now = parts_.system.now();
  const std::optional<LateCall> oldest = oldest_call();
  if (!oldest || parts_.monitor.has_failed()) return;
  if (comparison.number != oldest->number) comparison = {oldest->number, now};
  if (now - comparison.since < comparison.next_age) return;
  comparison.next_age *= 2;
  const auto views = parts_.monitor.ask_peers(
      oldest->deadline.earlier(parts_.system.deadline_in(Monitor::kAskTime)));
  for (int rank = 0; rank < parts_.monitor.roster().world_size(); ++rank) {
    const wire::Activity& its = views[static_cast<size_t>(rank)].activity;
    const bool is_same_number = its.state != wire::ActivityState::kNothingYet &&
                                its.number == oldest->number && !is_message(its.fingerprint);
    if (rank == parts_.monitor.roster().self || !is_same_number ||
        its.fingerprint == oldest->fingerprint) {
      continue;
    }
    OpProgress progress;
    progress.set_mismatch(rank, its.number, its.fingerprint);
    static_cast<void>(conclude(
        {{oldest->number, {&oldest->fingerprint, 1}, oldest->deadline, progress}, oldest->began},
        Error(ErrorCode::kInvalidArgument, "a peer has made another call")));
    return;
  }
}

void CollectiveRunner::abandon_enqueued(Duration since_failure) {
  std::deque<std::shared_ptr<Enqueued>> calls;
  {
    const std::lock_guard lock(mutex_);
    calls = enqueued_;
  }
  for (const auto& call : calls) {
    // An engine that can abort its operations ends them, because it sees the Interrupt.
    if (call->can->is_abortable && since_failure < kAbandonTime) continue;
    if (!call->claim_end()) continue;
    {
      const std::lock_guard lock(mutex_);
      abandoned_.push_back(call);
    }
    static_cast<void>(end_enqueued(call, parts_.monitor.error()));
    call->result.complete(abandoned_error(*call->can));
  }
}

Error CollectiveRunner::abandoned_error(const Capabilities& engine) const {
  const Error error = parts_.monitor.error();
  const std::string_view state = engine.is_abortable
                                     ? "has not ended this operation after the failure"
                                     : "cannot abort this operation";
  return Error(error.code(),
               format("{}\n  engine \"{}\" {} and may read and write its "
                      "buffers until this process ends: do not free or reuse them, and end the "
                      "process instead of calling rejoin()",
                      error.message(), engine.name, state))
      .with_details(error.details());
}

bool CollectiveRunner::has_abandoned() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(abandoned_, [](const auto& call) { return !call.expired(); });
}

void CollectiveRunner::stop() {
  is_stopping_ = true;
  std::unique_ptr<os::Thread> thread;
  {
    const std::lock_guard lock(mutex_);
    watch_.unpark();
    thread = watch_.take();
  }
  if (thread != nullptr) thread->join();
}

void CollectiveRunner::show(const Enqueued& call) {
  ActivityCell& cell = parts_.monitor.own_cell().collective;
  OpProgress(&cell.progress).set_phase(kEnqueuedPhase);
  cell.begin(call.number, call.fingerprints.front(), call.began);
}

void CollectiveRunner::explain(const Running& call, const Error& error) {
  const OpProgress& progress = call.context.progress;
  switch (error.code()) {
    case ErrorCode::kTimeout:
      return explain_timeout(call);
    case ErrorCode::kPeerLost:
      return explain_loss(call, error);
    case ErrorCode::kAborted:
      return;
    case ErrorCode::kInvalidArgument:
      if (progress.mismatch_peer >= 0) return explain_mismatch(call);
      if (progress.part_mismatch.sender >= 0) return explain_part_mismatch(call);
      break;
    case ErrorCode::kUnavailable:
    case ErrorCode::kCorruption:
    case ErrorCode::kInternal:
      break;
  }
  const Rank self = parts_.monitor.roster().self;
  const bool is_own = error.details().is_own_limit;
  const int culprit = is_own ? self.value : waiting_for(progress);
  const bool is_closed = is_own && error.code() == ErrorCode::kInvalidArgument;
  fail(call, {.code = error.code(),
              .culprit = culprit,
              .cause = error.message(),
              .remedy = std::string(is_closed ? kCloseOnlyOwn : "")});
}

// Reports this rank's own timeout, even if a peer's failure arrives meanwhile, provided that this
// rank can name the culprit with certainty.
void CollectiveRunner::explain_timeout(const Running& call) {
  parts_.monitor.fail_by_timeout({.activity = activity_of(call),
                                  .number = call.context.number,
                                  .waiting_for = waiting_for(call.context.progress)});
}

void CollectiveRunner::explain_loss(const Running& call, const Error& error) {
  const int peer = waiting_for(call.context.progress);
  const auto end = parts_.monitor.why_stream_ended(peer, error);
  if (end) fail(call, {ErrorCode::kPeerLost, end->culprit, end->cause, {}});
}

// Several ranks may detect the mismatch at once, each with a different peer. So this rank polls all
// peers and reports the lowest pair of ranks whose calls differ. If that pair does not include rank
// 0, this rank first waits for another rank to report a lower pair. If a lower rank has completed
// the operation, there probably is a lower pair, so this rank waits longer than a rank polls its
// peers.
void CollectiveRunner::explain_mismatch(const Running& call) {
  Monitor& monitor = parts_.monitor;
  const Roster& roster = monitor.roster();
  const OpProgress& progress = call.context.progress;
  const bool is_late = progress.own_number != 0;
  const Call own{roster.self.value, is_late ? progress.own_number : call.context.number,
                 is_late ? progress.own_fingerprint : call.context.fingerprint()};
  const Call its{progress.mismatch_peer, progress.mismatch_number, progress.mismatch_fingerprint};
  const wire::Activity activity = activity_of(call);
  monitor.fail_after([&] {
    const auto views = monitor.ask_peers(parts_.system.deadline_in(Monitor::kAskTime));
    const Mismatch mismatch = first_mismatch(views, {own, its});
    const bool is_first = std::min(mismatch.one.rank, mismatch.other.rank) == 0;
    const Duration patience =
        may_have_lower_pair(views, mismatch) ? Monitor::kDoubtTime : kSecondOpinionTime;
    return Finding{{.code = ErrorCode::kInvalidArgument,
                    .culprit = culprit_of(mismatch),
                    .cause = mismatch_cause(roster, mismatch),
                    .operation = activity,
                    .remedy = mismatch_remedy(mismatch)},
                   is_first ? Duration(0) : patience};
  });
}

void CollectiveRunner::explain_part_mismatch(const Running& call) {
  const OpProgress::PartMismatch& parts = call.context.progress.part_mismatch;
  const DType dtype = OpDescriptor::from_fingerprint(call.context.fingerprint()).dtype;
  fail(call, {.code = ErrorCode::kInvalidArgument,
              .culprit = parts.sender,
              .cause = part_mismatch_cause(parts_.monitor.roster(), parts, dtype),
              .remedy = std::string(kEqualParts)});
}

// Returns the rank for which the operation waits; -1 if it is unknown or if a plug-in engine names
// a rank that does not exist.
int CollectiveRunner::waiting_for(const OpProgress& progress) const {
  const int rank = progress.waiting_for();
  return rank < parts_.monitor.roster().world_size() ? rank : -1;
}

void CollectiveRunner::fail(const Running& call, Failure failure) {
  failure.operation = activity_of(call);
  parts_.monitor.fail(failure);
}

wire::Activity CollectiveRunner::activity_of(const Running& call) const {
  wire::Activity activity;
  activity.state = wire::ActivityState::kRunning;
  activity.number = call.context.number;
  activity.fingerprint = call.context.fingerprint();
  activity.age_ns = (parts_.system.now() - call.began).count();
  return activity;
}

}  // namespace cadre
