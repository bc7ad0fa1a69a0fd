// Makes a numbered sequence of items ahead of time on threads, and returns them in order.
//
// Threads: next() is called from one thread; `make` runs on num_threads threads at once. Blocking:
// next() waits until the item is ready, at most for the timeout; the destructor waits until the
// threads have finished their current items. Lifetime: borrows the System; the captures of `make`
// must outlive the prefetcher. Errors: kInvalidArgument for options out of range; next() throws the
// exception that `make` threw for that item, or kTimeout. Source: torch.utils.data.DataLoader's
// workers and prefetch_factor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/system.h"

namespace cadre {

struct PrefetchOptions {
  int num_threads = 1;
  int64_t depth = 2;  // the largest number of items that are being made or wait for next()
  // The depth is raised by num_threads, up to max_depth, each time that next() has to wait although
  // a thread was idle because of the depth since it was raised last. If it is below `depth`, the
  // depth stays.
  int64_t max_depth = 0;
  Duration timeout = std::chrono::minutes(5);  // the longest wait of one next()
};

template <typename T>
class Prefetcher {
 public:
  // Starts the threads, which make items 0, 1, ... num_items - 1.
  Prefetcher(os::System& system, int64_t num_items, std::function<T(int64_t)> make,
             const PrefetchOptions& options)
      : system_(system),
        num_items_(num_items),
        make_(std::move(make)),
        options_(options),
        taker_(system.make_waiter()),
        depth_(options.depth) {
    if (num_items < 0 || make_ == nullptr || options.num_threads < 1 || options.depth < 1) {
      throw Error(
          ErrorCode::kInvalidArgument,
          cadre::format("Prefetcher: {} items on {} threads with a depth of {}; pass a function, "
                        "at least 0 items, at least 1 thread and a depth of at least 1",
                        num_items, options.num_threads, options.depth));
    }
    for (int i = 0; i < options.num_threads; ++i) makers_.push_back(system.make_waiter());
    try {
      for (auto& maker : makers_) {
        threads_.push_back(system.spawn("cadre-prefetch", [this, &maker] { work(*maker); }));
      }
    } catch (...) {
      close();  // joins the threads that were spawned
      throw;
    }
  }
  ~Prefetcher() { close(); }
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Returns the next item. REQUIRES: next() was called fewer than num_items times, and no call has
  // thrown.
  T next() {
    Item item = take(system_.deadline_in(options_.timeout));
    for (auto& maker : makers_)
      // A slot is free again, so a thread may make another item.
      maker->unpark();
    if (item.error) std::rethrow_exception(item.error);
    return std::move(*item.value);
  }

  // Returns whether a call of next() has thrown kTimeout because its item was not ready.
  bool has_timed_out() const { return has_timed_out_; }
  // Returns the present depth.
  int64_t depth() const {
    const std::lock_guard lock(mutex_);
    return depth_;
  }

 private:
  static constexpr Duration kNap = std::chrono::seconds(1);

  struct Item {
    std::unique_ptr<T> value;
    std::exception_ptr error;
  };
  enum class Task { kMake, kWait, kEnd };

  Item take(Deadline deadline) {
    bool has_time = true;
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        if (const auto found = ready_.find(num_taken_); found != ready_.end()) {
          Item item = std::move(found->second);
          ready_.erase(found);
          ++num_taken_;
          return item;
        }
        raise_depth();
      }
      if (!has_time) {
        has_timed_out_ = true;
        throw Error(ErrorCode::kTimeout,
                    cadre::format("item {} of {} was not ready within {} s on {} threads; make the "
                                  "dataset faster, or raise the timeout",
                                  num_taken_, num_items_,
                                  std::chrono::duration<double>(options_.timeout).count(),
                                  options_.num_threads));
      }
      has_time = taker_->park(deadline);
    }
  }

  void work(os::Waiter& own) {
    int64_t index = 0;
    while (true) {
      const Task task = claim(index);
      if (task == Task::kEnd) return;
      if (task == Task::kWait) {
        own.park(system_.deadline_in(kNap));
        continue;
      }
      Item item;
      try {
        item.value = std::make_unique<T>(make_(index));
      } catch (...) {
        item.error = std::current_exception();
      }
      {
        const std::lock_guard lock(mutex_);
        ready_.emplace(index, std::move(item));
      }
      taker_->unpark();
    }
  }

  Task claim(int64_t& index) {
    const std::lock_guard lock(mutex_);
    if (is_closed_ || num_claimed_ == num_items_) return Task::kEnd;
    if (num_claimed_ - num_taken_ >= depth_) {
      was_limited_ = true;
      return Task::kWait;
    }
    index = num_claimed_++;
    return Task::kMake;
  }

  // Called with the mutex, when the caller has to wait for an item.
  void raise_depth() {
    if (!was_limited_ || depth_ >= options_.max_depth) return;
    depth_ = std::min(depth_ + options_.num_threads, options_.max_depth);
    was_limited_ = false;
  }

  void close() {
    {
      const std::lock_guard lock(mutex_);
      is_closed_ = true;
    }
    for (auto& maker : makers_) maker->unpark();
    for (auto& thread : threads_) thread->join();
  }

  os::System& system_;
  const int64_t num_items_;
  const std::function<T(int64_t)> make_;
  const PrefetchOptions options_;
  bool has_timed_out_ = false;  // used by the caller of next()
  std::unique_ptr<os::Waiter> taker_;
  std::vector<std::unique_ptr<os::Waiter>> makers_;  // one waiter for each thread
  std::vector<std::unique_ptr<os::Thread>> threads_;

  mutable std::mutex mutex_;  // guards the members below; never held while waiting or in `make`
  int64_t depth_;
  bool was_limited_ = false;  // a thread was idle because of depth_ since it was raised last
  std::map<int64_t, Item> ready_;
  int64_t num_claimed_ = 0;
  int64_t num_taken_ = 0;  // written only by next()
  bool is_closed_ = false;
};

}  // namespace cadre
