// Deliberate bugs, with which a test proves that the simulated tests would find them: a System and
// a Store that forward every call, except for one defect.
//
// Threads, blocking: those of the inner object, which must outlive them. For tests only.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/os/system.h"
#include "cadre/core/store/store.h"
#include "cadre/core/wire/store/store_message.h"
#include "cadre/testing/core/forwarding_system.h"

namespace cadre::testing {

enum class PlantedBug {
  kNone,
  kLostWakeUp,         // publish() does not wake the sleeping ranks
  kMissingAbortCheck,  // poll() ignores its last event, which signals an interrupt
  kUsedPages,          // released pages of memory keep their content
  kWrongTag,           // after a short send of a header, the rest has the previous message's tag
  kStaleRound,         // all rounds use the same keys in the store, and no key is erased
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
  BuggyStore(Store& inner, PlantedBug bug) : Store(inner.system()), inner_(inner), bug_(bug) {}

  Result<std::shared_ptr<Store>> clone(Deadline deadline) override {
    return inner_.clone(deadline);
  }

 private:
  Result<wire::StoreResponse> answer(wire::StoreRequest request, Deadline deadline) override;
  std::string rename(std::string_view key) const;

  Store& inner_;
  PlantedBug bug_;
};

}  // namespace cadre::testing
