// Virtual time and the baton, the right to run: only the thread that holds the baton runs, until it
// waits.
//
// Each simulated thread is a kernel thread that sleeps on its own gate except while it holds the
// baton. A thread that waits, or reaches a point where another thread might run, chooses the next
// holder at random from the seed. When no thread can run, time jumps to the next timer or event;
// when there is none, the simulation is deadlocked and reports what each thread waits for.
//
// Threads: every method is called by the holder of the baton (run() by the owner, while no thread
// holds it); so the members need no lock, and the gates order all accesses for ThreadSanitizer.
// Blocking: run(); and in virtual time pause() and wait().
// Errors: threads of a killed rank unwind by the exception Killed, thrown from step(), pause() and
// wait(). In a thread that unwinds already, these calls return at once instead, because a
// destructor must not throw.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/random.h"
#include "cadre/core/sim/gate.h"
#include "cadre/core/sim/history.h"

namespace cadre::sim {

// The exception that unwinds a thread of a killed rank. It does not derive from std::exception, so
// that the rank's code for handling errors does not catch it.
struct Killed {};

class Scheduler {
 public:
  struct Limits {
    int num_ranks = 0;
    int64_t max_points = 0;            // see SimOptions::max_points
    std::chrono::seconds stall_limit;  // see SimOptions::stall_limit
    bool keeps_history = true;         // see SimOptions::keeps_history
  };

  Scheduler(uint64_t seed, Limits limits);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Threads get numbers 0, 1, ... in the order of their creation.
  int add_thread(int rank, std::string name, std::function<void()> body);
  // Runs all threads to their end. Stopped ranks are killed when no other rank is left.
  void run();

  TimePoint now() const { return now_; }
  // Returns the time that the calling thread sees. In a thread that unwinds, it advances by an hour
  // in each call, so that a destructor which waits for a point in time finds it passed.
  TimePoint now_for_caller();
  Random& random() { return random_; }
  History& history() { return history_; }

  // Runs `action` at that time, while no simulated thread runs.
  void at(TimePoint time, std::function<void()> action);

  // Counts a scheduling point of the calling rank. Faults that were planned for this point take
  // effect.
  void count_point(std::string_view what);
  // Passes a scheduling point at which no other thread continues, for calls that are allowed under
  // a mutex.
  void step(std::string_view what);
  // Passes a scheduling point at which another thread may continue first.
  void pause(std::string_view what);
  // Passes a scheduling point like pause(), for a thread that has no work until others have run.
  void yield();
  // Waits until `ready` returns true or the deadline has passed. Returns true if `ready` has
  // returned true, false at the deadline.
  bool wait(std::string_view what, std::function<bool()> ready, Deadline deadline);
  // Waits like wait(), but calls `ready` once after each touch() with the caller's rank instead of
  // in every turn. REQUIRES: the result of `ready` changes only with such events.
  bool wait_for_touch(std::string_view what, std::function<bool()> ready, Deadline deadline);
  // Records a change for which a thread of this rank may wait.
  void touch(int rank) { ++processes_[static_cast<size_t>(rank)].num_touches; }
  // Waits until the thread has ended, also while unwinding: its body refers to objects of the
  // joiner.
  void join(int thread);

  // Sets a hook that is called at each scheduling point with the rank and its number of points so
  // far.
  void on_point(std::function<void(int rank, int64_t point)> hook) { on_point_ = std::move(hook); }
  // Kills a rank: its threads unwind, beginning with the next turn.
  void kill(int rank) { processes_[static_cast<size_t>(rank)].is_killed = true; }
  void stop(int rank) { processes_[static_cast<size_t>(rank)].is_stopped = true; }
  void resume(int rank) { processes_[static_cast<size_t>(rank)].is_stopped = false; }
  bool is_killed(int rank) const { return processes_[static_cast<size_t>(rank)].is_killed; }
  bool is_stopped(int rank) const { return processes_[static_cast<size_t>(rank)].is_stopped; }
  int64_t num_points(int rank) const { return processes_[static_cast<size_t>(rank)].num_points; }
  // Returns whether the caller belongs to a rank that is dead, so that its calls have no effect any
  // more.
  bool is_caller_dead() const;

  // Returns why the simulation was ended (deadlock, endless run); empty if it ran to its end.
  const std::string& failure() const { return failure_; }

 private:
  struct SimThread {
    int rank = 0;
    std::string name;
    std::string waits_for;
    // Returns whether the thread can run. An empty function means that it can.
    std::function<bool()> ready;
    // The rank's number of touches at the last call of ready(), and the result of that call. Used
    // by wait_for_touch().
    mutable int64_t seen_touches = -1;
    mutable bool was_ready = false;
    bool waits_for_touch = false;
    Deadline deadline{TimePoint{}};
    bool is_joining = false;  // a kill does not interrupt a join
    bool is_finished = false;
    Gate gate;
    std::thread thread;
  };
  struct Process {
    bool is_killed = false;
    bool is_stopped = false;
    int64_t num_points = 0;
    int64_t num_touches = 0;
  };

  void run_body(SimThread& self, std::function<void()> body);
  SimThread* current() const { return current_.load(std::memory_order_relaxed); }
  void watch();
  // Hands the baton (the right to run) to another thread; returns when this thread has it again.
  void switch_away();
  SimThread* pick_next();
  bool can_run(const SimThread& thread) const;
  bool is_ready(const SimThread& thread) const;
  bool is_frozen(const SimThread& thread) const;
  bool advance_time();
  void run_due_events();
  void spend_time();
  // Ends the simulation: every rank is killed, and `failure` says why.
  void fail(std::string_view reason);
  bool throw_if_killed();
  bool kill_stopped_ranks();

  const Limits limits_;
  const int core_;  // all simulated threads run on this core
  Random random_;
  History history_;
  const double stay_probability_;  // the probability that a thread keeps the baton at a pause
  TimePoint now_;
  // The clock is advanced by this many hours for threads that unwind.
  int64_t unwinding_hours_ = 0;
  std::atomic<int64_t> num_points_ = 0;  // is atomic because watch() reads it
  std::vector<Process> processes_;
  std::deque<SimThread> threads_;   // is a deque, so that adding a thread does not move the others
  std::vector<SimThread*> living_;  // the unfinished threads, in the order of their creation
  std::vector<SimThread*> candidates_;  // is a member so that pick_next() reuses its memory
  std::multimap<TimePoint, std::function<void()>> events_;
  // The thread that holds the baton; is atomic because watch() reads it.
  std::atomic<SimThread*> current_ = nullptr;
  Gate owner_;  // is open when all threads have ended
  std::function<void(int, int64_t)> on_point_;
  std::string failure_;
};

}  // namespace cadre::sim
