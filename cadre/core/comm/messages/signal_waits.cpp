#include "cadre/core/comm/messages/signal_waits.h"

#include "cadre/core/base/format.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/comm/failure/diagnosis.h"
#include "cadre/core/transport/shm/cpu_pause.h"

namespace cadre {
namespace {

constexpr const char* kPhase = "wait";
// The interval at which drain() checks whether all waits for signals have ended.
constexpr Duration kLook = std::chrono::milliseconds(1);

bool has_come(const SignalWaits::Goal& goal) {
  return static_cast<int32_t>(goal.word.value.load(std::memory_order_acquire) - goal.value) >= 0;
}

Fingerprint fingerprint_of(const SignalWaits::Goal& goal) {
  return OpDescriptor{.kind = OpKind::kWaitSignal, .root = goal.from, .count = goal.slot}
      .fingerprint();
}

}  // namespace

// Counts a caller as long as it uses the group's parts, which are only destroyed when no caller is
// counted.
class SignalWaits::Entry {
 public:
  explicit Entry(std::atomic<int>& count) : count_(count) { count_.fetch_add(1); }
  ~Entry() { count_.fetch_sub(1, std::memory_order_release); }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

 private:
  std::atomic<int>& count_;
};

void SignalWaits::wait(const Goal& goal, Deadline deadline) {
  const Entry entry(num_waiting_);
  {
    const std::lock_guard lock(mutex_);
    if (refusal_) throw *refusal_;
  }
  if (parts_.monitor.has_failed()) throw parts_.monitor.error();
  const TimePoint began = parts_.system.now();
  const uint64_t number = num_issued_.fetch_add(1, std::memory_order_relaxed) + 1;
  const Fingerprint fingerprint = fingerprint_of(goal);
  ActivityCell& cell = parts_.monitor.own_cell().message;
  OpProgress progress(&cell.progress);
  progress.set_phase(kPhase);
  progress.set_waiting_for(goal.from);
  cell.begin(number, fingerprint, began);
  const uint64_t index = parts_.recorder.begin(number, fingerprint, goal.from, began);
  Status status = run(goal, deadline);
  if (!status.ok() && status.error().code() == ErrorCode::kTimeout) {
    wire::Activity activity;
    activity.state = wire::ActivityState::kRunning;
    activity.number = number;
    activity.fingerprint = fingerprint;
    activity.age_ns = (parts_.system.now() - began).count();
    parts_.monitor.fail_by_timeout({.activity = activity,
                                    .waiting_for = goal.from.value,
                                    .where = format("signal slot {}", goal.slot)});
    status = parts_.monitor.published_failure();
  }
  const TimePoint now = parts_.system.now();
  progress.set_waiting_for(-1);
  cell.end(status.ok(), now);
  parts_.recorder.end(index, {status.ok(), status.ok() ? -1 : goal.from.value, kPhase, now});
  status.value_or_throw();
}

void SignalWaits::await_failure() {
  const Entry entry(num_waiting_);
  if (is_closed_.load(std::memory_order_acquire)) return;
  parts_.monitor.await_failure(-1, parts_.system.deadline_in(Monitor::kVerdictTime));
}

Status SignalWaits::run(const Goal& goal, Deadline deadline) {
  const int spins = parts_.is_crowded ? 0 : parts_.system.spin_limit();
  for (int i = 0; i < spins; ++i) {
    if (has_come(goal)) return {};
    cpu_pause();
  }
  return sleep(goal, deadline);
}

Status SignalWaits::sleep(const Goal& goal, Deadline deadline) {
  while (true) {
    const uint32_t seen = goal.word.value.load(std::memory_order_acquire);
    if (has_come(goal)) return {};
    CADRE_RETURN_IF_ERROR(check());
    if (!parts_.system.wait_while(goal.word, seen, deadline) && !has_come(goal)) {
      return Error(ErrorCode::kTimeout, "the deadline passed");
    }
  }
}

Status SignalWaits::check() const {
  if (parts_.monitor.has_failed()) return parts_.monitor.error();
  if (is_closed_.load(std::memory_order_acquire)) {
    return Error(ErrorCode::kAborted, "the group was closed while this rank waited for a signal");
  }
  return {};
}

void SignalWaits::refuse(const Error& reason) {
  const std::lock_guard lock(mutex_);
  if (!refusal_) refusal_ = reason;
}

bool SignalWaits::drain(Deadline deadline) {
  const std::unique_ptr<os::Waiter> waiter = parts_.system.make_waiter();
  while (!is_idle()) {
    if (deadline.has_passed(parts_.system.now())) return false;
    waiter->park(deadline.earlier(parts_.system.deadline_in(kLook)));
  }
  return true;
}

}  // namespace cadre
