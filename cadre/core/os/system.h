// The interface to the outside world: the clock, threads, waiting, sockets and shared memory.
//
// All code without torch that waits or communicates uses a System, so that the same transports,
// engines and Communicator run on threads, on processes (make_native_system()) and in the simulator
// (cadre/core/sim), where each wait hands the baton (the right to run) to another thread.
//
// Threads: all methods may be called from any thread.
// Blocking: only poll, wait_while, Waiter::park and Thread::join, each until its Deadline at most.
// Lifetime: a System outlives everything made by it.
// Rule: never call a blocking method, publish or yield while holding a mutex. In the simulator one
// thread runs at a time, and these calls may hand the baton to another; if that thread locks the
// mutex, the simulation deadlocks.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/os/shared_memory.h"
#include "cadre/core/os/socket.h"
#include "cadre/core/os/wait_word.h"

namespace cadre::os {

// A named thread; the owner joins it before the destructor runs.
class Thread {
 public:
  virtual ~Thread() = default;
  virtual void join() = 0;
};

// Blocks (parks) one thread until another thread unparks it. An unpark() before park() is
// remembered, so no wake-up is lost.
class Waiter {
 public:
  virtual ~Waiter() = default;
  // Returns true when unparked, false at the deadline.
  virtual bool park(Deadline deadline) = 0;
  virtual void unpark() = 0;
};

// Describes this process, for messages and for finding the processes that can share memory.
struct HostInfo {
  std::string name;  // "node0"
  // All processes of one running kernel in one network namespace have the same value: only these
  // can reach each other through unix sockets. Containers with network namespaces of their own
  // count as different hosts.
  std::string boot_id;
  int pid = 0;
  int num_cores = 1;  // the number of cores that this process may run on
  // The set of these cores as a bit mask: bit i % 8 of byte i / 8 stands for core i. Zero bytes at
  // the end are left out.
  std::string core_mask;
  uint64_t memory_bytes = 0;  // the physical memory of the machine
  // The largest size of a shared segment, most of whose pages are never used.
  uint64_t max_segment_bytes = 0;
};

class CADRE_EXPORT System {
 public:
  virtual ~System() = default;

  virtual TimePoint now() = 0;
  Deadline deadline_in(Duration budget) { return Deadline(now() + budget); }
  template <std::integral Rep, typename Period>
  Deadline deadline_in(std::chrono::duration<Rep, Period> budget) {
    return deadline_in(to_duration(budget));
  }

  virtual HostInfo host() = 0;

  // Starts a thread that runs `body`. `name` has at most 15 bytes (the kernel's limit).
  virtual std::unique_ptr<Thread> spawn(std::string name, std::function<void()> body) = 0;
  virtual std::unique_ptr<Waiter> make_waiter() = 0;

  // Returns the number of times that a caller may spin on a WaitWord, and then yield, before it
  // sleeps in wait_while. The number is large when each waiting thread has a core, small when
  // threads outnumber cores, and 0 in the simulator.
  virtual int spin_limit() = 0;
  // Lets another thread of this core run, by sched_yield(). In the simulator it is a scheduling
  // point.
  virtual void yield() = 0;
  // Sleeps while word.value == old. Spurious returns are possible, and the sleep lasts at most
  // kMaxNap, so that callers check their abort flag. Returns false only when the deadline has
  // passed.
  virtual bool wait_while(WaitWord& word, uint32_t old, Deadline deadline) = 0;
  // Stores `value` with release order and wakes all sleepers of the word, in every process.
  virtual void publish(WaitWord& word, uint32_t value) = 0;
  // Wakes all sleepers without a change of the value, for example after an abort flag was set.
  virtual void wake(WaitWord& word) = 0;

  // Waits until at least one item is ready; returns false when the deadline passed with none ready.
  virtual bool poll(std::span<PollItem> items, Deadline deadline) = 0;
  virtual Result<std::unique_ptr<Listener>> listen(const Address& address) = 0;
  // Blocks until the connection is open, no process listens (kUnavailable) or the deadline has
  // passed (kTimeout). The error is kUnavailable with ErrorDetails::is_own_limit if this process
  // can make no socket.
  virtual Result<std::unique_ptr<Socket>> connect(const Address& address, Deadline deadline) = 0;
  virtual std::unique_ptr<Event> make_event() = 0;
  virtual Result<std::unique_ptr<SharedMemory>> create_segment(size_t num_bytes) = 0;

  // Fills `out` with unpredictable bytes, which are seeded in the simulator.
  virtual void random_bytes(Bytes out) = 0;

  static constexpr Duration kMaxNap = std::chrono::milliseconds(20);
};

// Makes the System of the operating system. Each call makes an independent System; the ranks of a
// group that are threads of one process share one System.
CADRE_EXPORT std::unique_ptr<System> make_native_system();

}  // namespace cadre::os
