// A Store in the memory of one process, for ranks that are threads and for jobs of one rank.
//
// Threads: any. Blocking: the verbs that wait, until their Deadline; they park on os::Waiters, so
// the store also runs in the simulator. Lifetime: no call may be in progress when the store is
// destroyed. Errors: those of store.h; never kPeerLost. Source: c10d::HashStore.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include "cadre/core/os/system.h"
#include "cadre/core/store/key_table.h"
#include "cadre/core/store/store.h"

namespace cadre {

class CADRE_EXPORT HashStore final : public Store {
  struct State;

 public:
  explicit HashStore(os::System& system);
  // Called by clone() only.
  HashStore(os::System& system, std::shared_ptr<State> state);

  Result<std::shared_ptr<Store>> clone(Deadline deadline) override;

 private:
  // The state that a store and its clones share.
  struct State {
    std::mutex mutex;
    store::KeyTable table;
    store::KeyTable::Ticket next_ticket = 0;
    std::unordered_map<store::KeyTable::Ticket, os::Waiter*> waiters;
  };

  Result<wire::StoreResponse> answer(wire::StoreRequest request, Deadline deadline) override;
  // await_keys(), pop() and arrive() wait. They return with `lock` held.
  Status await_keys(const wire::StoreRequest& request, Deadline deadline,
                    std::unique_lock<std::mutex>& lock);
  Result<wire::StoreResponse> pop(const wire::StoreRequest& request, Deadline deadline,
                                  std::unique_lock<std::mutex>& lock);
  Result<wire::StoreResponse> arrive(const wire::StoreRequest& request, Deadline deadline,
                                     std::unique_lock<std::mutex>& lock);
  // Blocks until the ticket (a pending wait) is ready or the deadline has passed. `lock` is held
  // before and after the wait. Returns true if the thread was unparked. If the caller leaves by an
  // exception, its ticket is cancelled.
  bool park(store::KeyTable::Ticket ticket, Deadline deadline, std::unique_lock<std::mutex>& lock);
  // Wakes the callers whose tickets have become ready. REQUIRES: the lock is held.
  void wake_ready();

  std::shared_ptr<State> state_;
};

}  // namespace cadre
