#include "cadre/testing/torch/late_device/stream_queue.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <cstdio>
#include <utility>

namespace cadre::testing::late {
namespace {

// The longest run of kernels for which a stream stays slow or fast.
constexpr uint64_t kLongestPhase = 48;

uint64_t stream_number(int device, int id) {
  return static_cast<uint64_t>(device * kNumStreams + id);
}

}  // namespace

DelaySequence::DelaySequence(const Delays& delays, uint64_t stream)
    : longest_(delays.longest), random_(delays.seed * 1000 + stream) {}

std::chrono::microseconds DelaySequence::next() {
  if (longest_.count() <= 0) return {};
  if (num_left_in_phase_ == 0) {
    is_slow_ = random_() % 2 == 0;
    num_left_in_phase_ = 1 + random_() % kLongestPhase;
  }
  --num_left_in_phase_;
  const uint64_t drawn = random_() % static_cast<uint64_t>(longest_.count() + 1);
  return std::chrono::microseconds(is_slow_ ? static_cast<int64_t>(drawn) : 0);
}

void Event::set() {
  {
    const std::lock_guard lock(mutex_);
    if (is_set_) return;
    is_set_ = true;
    time_ = std::chrono::steady_clock::now();
  }
  changed_.notify_all();
}

bool Event::is_set() const {
  const std::lock_guard lock(mutex_);
  return is_set_;
}

bool Event::wait_for(std::chrono::milliseconds limit) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, limit, [&] { return is_set_; });
}

std::chrono::steady_clock::time_point Event::time() const {
  const std::lock_guard lock(mutex_);
  return time_;
}

StreamQueue::StreamQueue(int device, int id)
    : device_(device),
      id_(id),
      delays_({}, stream_number(device, id)),
      thread_([this] { run(); }) {}

std::string StreamQueue::name() const {
  return "late:" + std::to_string(device_) + " stream " + std::to_string(id_);
}

void StreamQueue::set_delays(const Delays& delays) {
  const std::lock_guard lock(mutex_);
  delays_ = DelaySequence(delays, stream_number(device_, id_));
}

void StreamQueue::enqueue(std::function<void()> task, TaskKind kind) {
  {
    const std::lock_guard lock(mutex_);
    if (is_closing_) return;
    const auto delay =
        kind == TaskKind::kKernel ? delays_.next() : std::chrono::microseconds::zero();
    tasks_.push_back({std::move(task), delay});
    ++num_unfinished_;
  }
  changed_.notify_one();
}

std::shared_ptr<Event> StreamQueue::record() {
  auto event = std::make_shared<Event>(this);
  {
    const std::lock_guard lock(mutex_);
    if (!is_closing_) {
      tasks_.push_back({[event] { event->set(); }, {}});
      ++num_unfinished_;
      changed_.notify_one();
      return event;
    }
  }
  event->set();
  return event;
}

void StreamQueue::wait_event(std::shared_ptr<Event> event) {
  enqueue(
      [this, event = std::move(event)] {
        TORCH_CHECK(event->wait_for(kWaitLimit), name(), " waited ", kWaitLimit.count(),
                    " s for an event ",
                    event->stream() != nullptr ? "of " + event->stream()->name() : "of a hold",
                    ", which has not happened: release the holds of that stream first");
      },
      TaskKind::kOther);
}

bool StreamQueue::is_idle() const {
  const std::lock_guard lock(mutex_);
  return num_unfinished_ == 0;
}

void StreamQueue::synchronize(std::chrono::milliseconds limit) {
  if (!record()->wait_for(limit)) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(
        false, name(), " has not run its ", num_unfinished_, " tasks within ", limit.count(),
        " ms: release its holds, and those of the streams whose events it waits for, before "
        "the host waits");
  }
  throw_failure();
}

void StreamQueue::throw_failure() {
  std::exception_ptr failure;
  {
    const std::lock_guard lock(mutex_);
    failure = std::exchange(failure_, nullptr);
  }
  if (failure) std::rethrow_exception(failure);
}

void StreamQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
  try {
    throw_failure();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: a kernel failed and nothing waited for the stream: %s\n",
                 name().c_str(), error.what());
  }
}

void StreamQueue::run() {
  pthread_setname_np(pthread_self(),
                     ("late-" + std::to_string(device_) + "-" + std::to_string(id_)).c_str());
  at::init_num_threads();
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !tasks_.empty() || is_closing_; });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    if (task.delay.count() > 0) std::this_thread::sleep_for(task.delay);
    std::exception_ptr failure;
    try {
      task.run();
    } catch (...) {
      failure = std::current_exception();
    }
    task.run = nullptr;  // what the task owned may be freed, which enqueues
    lock.lock();
    if (failure && !failure_) failure_ = std::move(failure);
    --num_unfinished_;
  }
}

StreamQueue& StreamTable::get(int device, int id) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<StreamQueue>& queue =
      queues_.at(static_cast<size_t>(device)).at(static_cast<size_t>(id));
  if (!queue) {
    queue = std::make_unique<StreamQueue>(device, id);
    queue->set_delays(delays_);
  }
  return *queue;
}

void StreamTable::set_delays(const Delays& delays) {
  const std::lock_guard lock(mutex_);
  delays_ = delays;
  for (auto& of_device : queues_) {
    for (auto& queue : of_device) {
      if (queue) queue->set_delays(delays);
    }
  }
}

std::vector<StreamQueue*> StreamTable::started(int device) const {
  const std::lock_guard lock(mutex_);
  std::vector<StreamQueue*> queues;
  for (const auto& queue : queues_.at(static_cast<size_t>(device))) {
    if (queue) queues.push_back(queue.get());
  }
  return queues;
}

void StreamTable::synchronize(int device) {
  std::exception_ptr failure;
  for (StreamQueue* queue : started(device)) {
    try {
      queue->synchronize();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void StreamTable::close() {
  for (int device = 0; device < kNumDevices; ++device) {
    for (StreamQueue* queue : started(device)) queue->close();
  }
}

}  // namespace cadre::testing::late
