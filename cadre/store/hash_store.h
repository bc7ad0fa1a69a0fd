// A Store in the memory of one process: for ranks that are threads, and for a world of one.
//
// Threads: any. Blocking: the verbs that wait, until their Deadline; they park on os::Waiters,
// so it also runs in the simulator. Lifetime: the System outlives it; no call may be in progress
// when it is destroyed. Errors: as in store.h; never kPeerLost.
// Source: c10d::HashStore.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include "cadre/os/system.h"
#include "cadre/store/key_table.h"
#include "cadre/store/store.h"

namespace cadre {

class CADRE_EXPORT HashStore final : public Store {
  struct State;

 public:
  explicit HashStore(os::System& system);
  // Use clone().
  HashStore(os::System& system, std::shared_ptr<State> state);

  Status set(std::string_view key, std::string_view value, Deadline deadline) override;
  Result<std::string> get(std::string_view key, Deadline deadline) override;
  Result<int64_t> add(std::string_view key, int64_t amount, Deadline deadline) override;
  Status wait(std::span<const std::string> keys, Deadline deadline) override;
  Result<bool> check(std::span<const std::string> keys, Deadline deadline) override;
  Result<std::string> compare_set(std::string_view key, std::string_view expected,
                                  std::string_view desired, Deadline deadline) override;
  Result<bool> erase(std::string_view key, Deadline deadline) override;
  Result<int64_t> num_keys(Deadline deadline) override;
  Status append(std::string_view key, std::string_view value, Deadline deadline) override;
  Result<std::vector<std::string>> multi_get(std::span<const std::string> keys,
                                             Deadline deadline) override;
  Status multi_set(std::span<const std::string> keys, std::span<const std::string> values,
                   Deadline deadline) override;
  Result<std::vector<std::string>> list_keys(Deadline deadline) override;
  Status queue_push(std::string_view queue, std::string_view value, Deadline deadline) override;
  Result<std::string> queue_pop(std::string_view queue, Deadline deadline) override;
  Result<std::optional<std::string>> try_queue_pop(std::string_view queue,
                                                   Deadline deadline) override;
  Result<int64_t> queue_length(std::string_view queue, Deadline deadline) override;
  Status barrier(std::string_view key, int64_t num_arrivals, Deadline deadline) override;
  Result<std::shared_ptr<Store>> clone(Deadline deadline) override;

 private:
  // What a store and its clones share.
  struct State {
    std::mutex mutex;
    KeyTable table;
    KeyTable::Ticket next_ticket = 0;
    std::unordered_map<KeyTable::Ticket, os::Waiter*> waiters;
  };

  // Returns with `lock` held once all keys are there, or with the timeout of `verb`.
  Status wait_for(std::string_view verb, std::span<const std::string> keys, Deadline deadline,
                  std::unique_lock<std::mutex>& lock);
  // Parks until the ticket is ready or the deadline; with `lock` held before and after. True when
  // unparked. A caller that leaves by an exception has its ticket cancelled.
  bool park(KeyTable::Ticket ticket, os::Waiter& waiter, Deadline deadline,
            std::unique_lock<std::mutex>& lock);
  // Unparks whose keys have appeared. REQUIRES: the lock held.
  void wake_ready();

  os::System& system_;
  std::shared_ptr<State> state_;
};

}  // namespace cadre
