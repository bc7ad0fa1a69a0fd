#include "cadre/core/store/hash_store.h"

#include <utility>

#include "cadre/core/store/table_answers.h"

namespace cadre {

using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;

HashStore::HashStore(os::System& system) : HashStore(system, std::make_shared<State>()) {}

HashStore::HashStore(os::System& system, std::shared_ptr<State> state)
    : Store(system), state_(std::move(state)) {}

Result<StoreResponse> HashStore::answer(StoreRequest request, Deadline deadline) {
  std::unique_lock lock(state_->mutex);
  switch (request.verb) {
    case StoreVerb::kGet:
    case StoreVerb::kWait:
    case StoreVerb::kMultiGet:
      CADRE_RETURN_IF_ERROR(await_keys(request, deadline, lock));
      break;
    case StoreVerb::kQueuePop:
      return pop(request, deadline, lock);
    case StoreVerb::kBarrier:
      return arrive(request, deadline, lock);
    default:
      break;
  }
  StoreResponse response = store::answer_from(state_->table, request);
  wake_ready();
  return response;
}

Result<StoreResponse> HashStore::pop(const StoreRequest& request, Deadline deadline,
                                     std::unique_lock<std::mutex>& lock) {
  const store::KeyTable::Ticket ticket = state_->next_ticket++;
  if (auto item = state_->table.pop_or_wait(ticket, request.keys[0])) {
    return StoreResponse{.values = {*std::move(item)}};
  }
  park(ticket, deadline, lock);
  if (auto item = state_->table.take_item(ticket)) {
    return StoreResponse{.values = {*std::move(item)}};
  }
  state_->table.cancel(ticket);
  return store::timeout_from(state_->table, request);
}

Result<StoreResponse> HashStore::arrive(const StoreRequest& request, Deadline deadline,
                                        std::unique_lock<std::mutex>& lock) {
  const store::KeyTable::Ticket ticket = state_->next_ticket++;
  const Result<bool> arrived = state_->table.arrive(ticket, request.keys[0], request.amount);
  if (!arrived.ok()) return arrived.error();
  wake_ready();
  if (*arrived) return StoreResponse();
  park(ticket, deadline, lock);
  if (!state_->table.is_waiting(ticket)) return StoreResponse();
  state_->table.cancel(ticket);
  return store::timeout_from(state_->table, request);
}

Result<std::shared_ptr<Store>> HashStore::clone(Deadline) {
  return std::shared_ptr<Store>(std::make_shared<HashStore>(system(), state_));
}

Status HashStore::await_keys(const StoreRequest& request, Deadline deadline,
                             std::unique_lock<std::mutex>& lock) {
  while (true) {
    const store::KeyTable::Ticket ticket = state_->next_ticket++;
    if (state_->table.wait(ticket, request.keys)) return {};
    const bool unparked = park(ticket, deadline, lock);
    state_->table.cancel(ticket);
    if (state_->table.has_all(request.keys)) return {};
    if (!unparked) return store::timeout_from(state_->table, request);
  }
}

bool HashStore::park(store::KeyTable::Ticket ticket, Deadline deadline,
                     std::unique_lock<std::mutex>& lock) {
  const std::unique_ptr<os::Waiter> waiter = system().make_waiter();
  state_->waiters.emplace(ticket, waiter.get());
  lock.unlock();
  const auto leave = [&] {
    // Holding the lock again also ensures that no other thread is still calling unpark() on this
    // Waiter.
    lock.lock();
    state_->waiters.erase(ticket);
  };
  bool unparked = false;
  try {
    unparked = waiter->park(deadline);
  } catch (...) {
    // The simulator kills a rank by an exception. The rank's waiter must not stay in the shared
    // state.
    leave();
    state_->table.cancel(ticket);
    wake_ready();  // an item that was assigned to this rank goes to the next rank that waits
    throw;
  }
  leave();
  return unparked;
}

void HashStore::wake_ready() {
  for (const store::KeyTable::Ticket ticket : state_->table.take_ready()) {
    const auto waiter = state_->waiters.find(ticket);
    if (waiter != state_->waiters.end()) waiter->second->unpark();
  }
}

}  // namespace cadre
