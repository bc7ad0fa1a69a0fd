// The streams and events of the late device. One thread for each stream runs the tasks of that
// stream in order. Only events order two streams.
//
// Threads: any. Blocking: StreamQueue::synchronize() and wait_for(), at most kWaitLimit; the other
// functions do not block. Lifetime: an event may outlive its wait, not its stream. Errors: the
// first exception of a task is kept. The next synchronisation of its stream throws it, once. The
// tasks that follow run nevertheless. Source: CUDA's streams and events.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cadre/testing/torch/late_device/counters.h"

namespace cadre::testing::late {

// Stream 0 of a device is its default stream; the others are its pool.
inline constexpr int kNumStreams = 9;
// A wait that takes longer fails with an error that names the stream.
inline constexpr std::chrono::seconds kWaitLimit{60};

// Random delays of the kernels of each stream.
struct Delays {
  std::chrono::microseconds longest{0};  // delay of one kernel; 0: no delays
  uint64_t seed = 1;
};

// The delays of one stream. The stream is slow for a random number of kernels, then fast for
// another, so that of two streams either can be ahead. One seed gives one sequence.
class DelaySequence {
 public:
  DelaySequence(const Delays& delays, uint64_t stream);
  std::chrono::microseconds next();

 private:
  std::chrono::microseconds longest_;
  std::mt19937_64 random_;
  bool is_slow_ = false;
  uint64_t num_left_in_phase_ = 0;
};

class StreamQueue;

// A point in the order of a stream. It happens once.
class Event {
 public:
  explicit Event(StreamQueue* stream) : stream_(stream) {}
  void set();
  bool is_set() const;
  // Returns false when the event has not happened within `limit`.
  bool wait_for(std::chrono::milliseconds limit) const;
  // Time at which the event happened. Precondition: is_set().
  std::chrono::steady_clock::time_point time() const;
  // The stream that the event was recorded on; null for the gate of a StreamHold.
  StreamQueue* stream() const { return stream_; }

 private:
  StreamQueue* const stream_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool is_set_ = false;
  std::chrono::steady_clock::time_point time_;
};

class StreamQueue {
 public:
  // A kernel is delayed as `Delays` says; the other tasks run at once.
  enum class TaskKind { kKernel, kOther };

  StreamQueue(int device, int id);
  ~StreamQueue() { close(); }
  StreamQueue(const StreamQueue&) = delete;
  StreamQueue& operator=(const StreamQueue&) = delete;

  void set_delays(const Delays& delays);
  void enqueue(std::function<void()> task, TaskKind kind);
  // Returns an event that happens when everything enqueued so far has run.
  std::shared_ptr<Event> record();
  // Lets the tasks that are enqueued later wait for the event.
  void wait_event(std::shared_ptr<Event> event);
  bool is_idle() const;
  // Waits until everything enqueued so far has run, then throws the failure of a task, if there is
  // one.
  void synchronize(std::chrono::milliseconds limit = kWaitLimit);
  // Throws the failure of a task, if there is one that was not thrown before.
  void throw_failure();
  // Runs what is enqueued, joins the thread, and prints a failure that nothing waited for. Later
  // tasks are dropped, and later events have happened.
  void close();
  std::string name() const;
  int device() const { return device_; }
  // Whether the stream says that it records a graph; see StreamCapture.
  std::atomic<bool> is_capturing{false};

 private:
  struct Task {
    std::function<void()> run;
    std::chrono::microseconds delay;
  };
  void run();

  const int device_, id_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  size_t num_unfinished_ = 0;
  bool is_closing_ = false;
  std::exception_ptr failure_;
  DelaySequence delays_;
  std::thread thread_;  // the last member, because it uses the others
};

// The streams of all devices. The thread of a stream starts at its first use.
class StreamTable {
 public:
  StreamQueue& get(int device, int id);
  void set_delays(const Delays& delays);
  // Waits for all streams of the device, then throws the failure of one of them, if there is one.
  void synchronize(int device);
  void close();

 private:
  // The streams of the device that have been used.
  std::vector<StreamQueue*> started(int device) const;

  mutable std::mutex mutex_;
  Delays delays_;
  std::array<std::array<std::unique_ptr<StreamQueue>, kNumStreams>, kNumDevices> queues_;
};

}  // namespace cadre::testing::late
