// Bugs on purpose, to prove that the simulated tests would find them: a System and a Store that
// pass everything on, but for one thing.
//
// Threads, blocking, lifetime: as what they wrap, which outlives them. For tests only.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/os/system.h"
#include "cadre/store/store.h"
#include "cadre/testing/forwarding_system.h"

namespace cadre::testing {

enum class PlantedBug {
  kNone,
  kLostWakeUp,         // publish() forgets the sleepers
  kMissingAbortCheck,  // poll() does not look at an event in the last place: the interrupt's
  kUsedPages,          // pages that were given back keep their content
  kWrongTag,           // the rest of a header whose send was short comes from the header before
  kStaleRound,         // keys of all rounds are the same, and none is erased (in the store)
};

class BuggySystem final : public ForwardingSystem {
 public:
  BuggySystem(os::System& inner, PlantedBug bug) : ForwardingSystem(inner), bug_(bug) {}

  void publish(os::WaitWord& word, uint32_t value) override {
    if (bug_ != PlantedBug::kLostWakeUp) return inner_.publish(word, value);
    word.value.store(value, std::memory_order_release);
    inner_.yield();
  }
  void wake(os::WaitWord& word) override {
    if (bug_ != PlantedBug::kLostWakeUp) inner_.wake(word);
  }
  bool poll(std::span<os::PollItem> items, Deadline deadline) override {
    const bool hides_last = bug_ == PlantedBug::kMissingAbortCheck && items.size() > 1 &&
                            dynamic_cast<os::Event*>(items.back().target) != nullptr;
    return inner_.poll(hides_last ? items.first(items.size() - 1) : items, deadline);
  }
  Result<std::unique_ptr<os::Listener>> listen(const os::Address& address) override;
  Result<std::unique_ptr<os::Socket>> connect(const os::Address& address,
                                              Deadline deadline) override;
  Result<std::unique_ptr<os::SharedMemory>> create_segment(size_t num_bytes) override;

 private:
  PlantedBug bug_;
};

class BuggyStore final : public Store {
 public:
  BuggyStore(Store& inner, PlantedBug bug) : inner_(inner), bug_(bug) {}

  Status set(std::string_view key, std::string_view value, Deadline deadline) override {
    return inner_.set(rename(key), value, deadline);
  }
  Result<std::string> get(std::string_view key, Deadline deadline) override {
    return inner_.get(rename(key), deadline);
  }
  Result<int64_t> add(std::string_view key, int64_t amount, Deadline deadline) override {
    return inner_.add(rename(key), amount, deadline);
  }
  Status wait(std::span<const std::string> keys, Deadline deadline) override {
    return inner_.wait(rename(keys), deadline);
  }
  Result<bool> check(std::span<const std::string> keys, Deadline deadline) override {
    return inner_.check(rename(keys), deadline);
  }
  Result<std::string> compare_set(std::string_view key, std::string_view expected,
                                  std::string_view desired, Deadline deadline) override {
    return inner_.compare_set(rename(key), expected, desired, deadline);
  }
  Result<bool> erase(std::string_view key, Deadline deadline) override {
    if (bug_ == PlantedBug::kStaleRound) return true;
    return inner_.erase(key, deadline);
  }
  Result<int64_t> num_keys(Deadline deadline) override { return inner_.num_keys(deadline); }
  Status append(std::string_view key, std::string_view value, Deadline deadline) override {
    return inner_.append(rename(key), value, deadline);
  }
  Result<std::vector<std::string>> multi_get(std::span<const std::string> keys,
                                             Deadline deadline) override {
    return inner_.multi_get(rename(keys), deadline);
  }
  Status multi_set(std::span<const std::string> keys, std::span<const std::string> values,
                   Deadline deadline) override {
    return inner_.multi_set(rename(keys), values, deadline);
  }
  Result<std::vector<std::string>> list_keys(Deadline deadline) override {
    return inner_.list_keys(deadline);
  }
  Status queue_push(std::string_view queue, std::string_view value, Deadline deadline) override {
    return inner_.queue_push(rename(queue), value, deadline);
  }
  Result<std::string> queue_pop(std::string_view queue, Deadline deadline) override {
    return inner_.queue_pop(rename(queue), deadline);
  }
  Result<std::optional<std::string>> try_queue_pop(std::string_view queue,
                                                   Deadline deadline) override {
    return inner_.try_queue_pop(rename(queue), deadline);
  }
  Result<int64_t> queue_length(std::string_view queue, Deadline deadline) override {
    return inner_.queue_length(rename(queue), deadline);
  }
  Status barrier(std::string_view key, int64_t num_arrivals, Deadline deadline) override {
    return inner_.barrier(rename(key), num_arrivals, deadline);
  }
  Result<std::shared_ptr<Store>> clone(Deadline deadline) override {
    return inner_.clone(deadline);
  }

 private:
  std::string rename(std::string_view key) const;
  std::vector<std::string> rename(std::span<const std::string> keys) const;

  Store& inner_;
  PlantedBug bug_;
};

}  // namespace cadre::testing
