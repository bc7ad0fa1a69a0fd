#include "cadre/core/sim/scheduler.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>

#include "cadre/core/base/format.h"

namespace cadre::sim {
namespace {

// The virtual time between two scheduling points is 100 ns to 1.1 us, so that even a program that
// only yields reaches its deadline.
constexpr uint64_t kMinTurnNs = 100;
constexpr uint64_t kTurnSpreadNs = 1000;
// A thread that yields while no other can run skips at most this much virtual time.
constexpr Duration kMaxYieldJump = std::chrono::microseconds(100);

// A deadline that no timer reaches; join() uses it.
constexpr TimePoint kNever{INT64_MAX};

// Returns the probability that a thread keeps the baton (the right to run) in pause(). With 0 it
// always hands the baton over, which finds races; with a large value threads run long without a
// switch, which finds starvation.
double choose_stay_probability(uint64_t seed) {
  constexpr std::array<double, 3> kChoices = {0.0, 0.5, 0.9};
  return kChoices[Random(seed ^ 0x5bd1e995).below(kChoices.size())];
}

// Pins the simulated threads to one core, because only one of them runs at a time: a switch to a
// thread of the same core is several times faster than a wake-up of a thread of another core. If
// the system returns an error, the simulation only gets slower.
void stay_on_core(int core) {
  if (core < 0 || core >= CPU_SETSIZE) return;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<size_t>(core), &cores);
  ::sched_setaffinity(0, sizeof(cores), &cores);
}

}  // namespace

Scheduler::Scheduler(uint64_t seed, Limits limits)
    : limits_(limits),
      core_(::sched_getcpu()),
      random_(seed),
      history_(limits.keeps_history),
      stay_probability_(choose_stay_probability(seed)),
      processes_(static_cast<size_t>(limits.num_ranks)) {}

Scheduler::~Scheduler() {
  for (SimThread& thread : threads_) {
    if (thread.thread.joinable()) thread.thread.join();
  }
}

int Scheduler::add_thread(int rank, std::string name, std::function<void()> body) {
  SimThread& self = threads_.emplace_back();
  living_.push_back(&self);
  self.rank = rank;
  self.name = cadre::format("rank{}/{}", rank, name);
  history_.add(now_, self.name, "born");
  self.thread = std::thread(
      [this, &self, body = std::move(body)]() mutable { run_body(self, std::move(body)); });
  return static_cast<int>(threads_.size()) - 1;
}

void Scheduler::run_body(SimThread& self, std::function<void()> body) {
  stay_on_core(core_);
  self.gate.pass();
  try {
    if (!throw_if_killed()) body();
  } catch (const Killed&) {
    history_.add(now_, self.name, "unwound");
  }
  // The objects that the body owns must be destroyed while this thread still has the right to run.
  body = nullptr;
  self.is_finished = true;
  std::erase(living_, &self);
  history_.add(now_, self.name, "ended");
  SimThread* next = pick_next();
  current_ = next;
  // This is the last action of the thread, because afterwards another thread may destroy
  // everything.
  (next != nullptr ? next->gate : owner_).open();
}

void Scheduler::run() {
  current_ = pick_next();
  if (current_ == nullptr) return;
  current()->gate.open();
  watch();
  for (SimThread& thread : threads_) thread.thread.join();
}

// Ends the process with a message if a thread runs for longer than stall_limit without a call of
// its System: such a thread cannot be unwound, and would hang the test without a message. Runs in
// the owner's thread while the ranks run.
void Scheduler::watch() {
  int64_t last = -1;
  while (!owner_.pass_within(limits_.stall_limit)) {
    const int64_t so_far = num_points_.load();
    if (so_far != last) {
      last = so_far;
      continue;
    }
    const std::string text = cadre::format(
        "simulation stalled: {} has run for {} s without a call of its System. Either it loops "
        "without such a call, or it waits for a mutex that a waiting thread holds (see the rule in "
        "os/system.h)\n",
        current()->name, limits_.stall_limit.count());
    std::fputs(text.c_str(), stderr);
    std::abort();
  }
}

TimePoint Scheduler::now_for_caller() {
  if (is_caller_dead()) return now_ + std::chrono::hours(++unwinding_hours_);
  return now_;
}

void Scheduler::at(TimePoint time, std::function<void()> action) {
  events_.emplace(time, std::move(action));
}

bool Scheduler::is_caller_dead() const {
  return current_ != nullptr && is_killed(current()->rank);
}

void Scheduler::count_point(std::string_view what) {
  if (current_ == nullptr || is_caller_dead()) return;
  Process& process = processes_[static_cast<size_t>(current()->rank)];
  ++process.num_points;
  history_.add(now_, current()->name, what);
  if (++num_points_ == limits_.max_points) {
    fail(cadre::format("the simulation did not end within {} scheduling points",
                       limits_.max_points));
  }
  if (on_point_) on_point_(current()->rank, process.num_points);
}

void Scheduler::step(std::string_view what) {
  if (current_ == nullptr) return;
  count_point(what);
  if (!throw_if_killed()) spend_time();
}

void Scheduler::pause(std::string_view what) {
  if (current_ == nullptr) return;
  count_point(what);
  if (throw_if_killed()) return;
  spend_time();
  const bool may_stay = !is_frozen(*current());
  if (may_stay && random_.unit() < stay_probability_) return;
  switch_away();
  throw_if_killed();
}

void Scheduler::yield() {
  if (current_ == nullptr) return;
  count_point("yield");
  if (throw_if_killed()) return;
  spend_time();
  const auto others = std::count_if(living_.begin(), living_.end(),
                                    [this](const SimThread* thread) { return can_run(*thread); });
  if (others <= 1) {
    const TimePoint end = now_ + kMaxYieldJump;
    now_ = events_.empty() ? end : std::clamp(events_.begin()->first, now_, end);
  }
  switch_away();
  throw_if_killed();
}

bool Scheduler::wait_for_touch(std::string_view what, std::function<bool()> ready,
                               Deadline deadline) {
  struct Marking {
    SimThread* thread;
    ~Marking() {
      if (thread != nullptr) thread->waits_for_touch = false;
    }
  };
  const Marking marking{current()};
  if (current() != nullptr) {
    current()->seen_touches = -1;
    current()->waits_for_touch = true;
  }
  return wait(what, std::move(ready), deadline);
}

bool Scheduler::wait(std::string_view what, std::function<bool()> ready, Deadline deadline) {
  if (current_ == nullptr) return ready();
  count_point(what);
  if (throw_if_killed()) return false;
  spend_time();
  SimThread& self = *current();
  self.waits_for = what;
  self.ready = std::move(ready);
  self.deadline = deadline;
  // Clears `ready` also if an exception ends the wait, because `ready` refers to objects of the
  // caller.
  struct Clearing {
    SimThread& thread;
    ~Clearing() { thread.ready = nullptr; }
  };
  bool is_ready = false;
  {
    const Clearing clearing{self};
    switch_away();
    is_ready = self.ready();
  }
  return !throw_if_killed() && is_ready;
}

void Scheduler::join(int thread) {
  if (current_ == nullptr) return;
  count_point("join");
  SimThread& self = *current();
  const SimThread& other = threads_[static_cast<size_t>(thread)];
  self.waits_for = cadre::format("the end of {}", other.name);
  self.ready = [&other] { return other.is_finished; };
  self.deadline = Deadline(kNever);
  self.is_joining = true;
  while (!other.is_finished) switch_away();
  self.is_joining = false;
  self.ready = nullptr;
}

bool Scheduler::throw_if_killed() {
  if (!is_caller_dead()) return false;
  if (std::uncaught_exceptions() == 0) throw Killed{};
  return true;
}

void Scheduler::switch_away() {
  SimThread* self = current_;
  SimThread* next = pick_next();
  if (next == self) return;
  current_ = next;
  next->gate.open();
  self->gate.pass();
}

// Returns whether the thread must not run. Threads of a stopped rank do not run; those of a killed
// rank run, to unwind.
bool Scheduler::is_frozen(const SimThread& thread) const {
  return is_stopped(thread.rank) && !is_killed(thread.rank);
}

bool Scheduler::can_run(const SimThread& thread) const {
  if (is_frozen(thread)) return false;
  if (is_ready(thread) || thread.deadline.has_passed(now_)) return true;
  return is_killed(thread.rank) && !thread.is_joining;
}

bool Scheduler::is_ready(const SimThread& thread) const {
  if (!thread.ready) return true;
  if (!thread.waits_for_touch) return thread.ready();
  const int64_t touches = processes_[static_cast<size_t>(thread.rank)].num_touches;
  if (thread.seen_touches == touches) return thread.was_ready;
  thread.seen_touches = touches;
  thread.was_ready = thread.ready();
  return thread.was_ready;
}

Scheduler::SimThread* Scheduler::pick_next() {
  for (;;) {
    run_due_events();
    candidates_.clear();
    for (SimThread* const thread : living_) {
      if (can_run(*thread)) candidates_.push_back(thread);
    }
    if (!candidates_.empty()) return candidates_[random_.below(candidates_.size())];
    if (advance_time() || kill_stopped_ranks()) continue;
    if (living_.empty()) return nullptr;
    fail("deadlock: no thread can run and no timer is set");
  }
}

// Advances the time to the next event or deadline; returns false if no thread waits for one. A
// stopped thread has no deadline, but an event may let it continue.
bool Scheduler::advance_time() {
  std::optional<TimePoint> next;
  for (const SimThread* const thread : living_) {
    if (is_frozen(*thread)) continue;
    const TimePoint deadline = thread->deadline.at();
    if (deadline != kNever && (!next || deadline < *next)) next = deadline;
  }
  if (living_.empty()) return false;
  if (!events_.empty() && (!next || events_.begin()->first < *next)) next = events_.begin()->first;
  if (!next) return false;
  now_ = std::max(now_, *next);
  return true;
}

bool Scheduler::kill_stopped_ranks() {
  bool found = false;
  for (const SimThread* const thread : living_) {
    if (!is_frozen(*thread)) continue;
    kill(thread->rank);
    found = true;
  }
  return found;
}

void Scheduler::run_due_events() {
  while (!events_.empty() && events_.begin()->first <= now_) {
    const std::function<void()> action = std::move(events_.begin()->second);
    events_.erase(events_.begin());
    action();
  }
}

void Scheduler::spend_time() {
  now_ = now_ + Duration(static_cast<int64_t>(kMinTurnNs + random_.below(kTurnSpreadNs)));
}

void Scheduler::fail(std::string_view reason) {
  if (!failure_.empty()) {
    // All ranks have been killed, and still a thread waits: it joins another thread, which never
    // ends.
    std::fputs((failure_ + "\n").c_str(), stderr);
    std::abort();
  }
  failure_ = cadre::format("{} (at {} ns)", reason, now_.ns);
  for (const SimThread* const thread : living_) {
    failure_ += cadre::format("\n  {} {}{}", thread->name,
                              thread->ready ? "waits for " + thread->waits_for : "can run",
                              is_frozen(*thread) ? " (stopped)" : "");
  }
  for (int rank = 0; rank < limits_.num_ranks; ++rank) kill(rank);
}

}  // namespace cadre::sim
