#include "cadre/store/hash_store.h"

#include <utility>

#include "cadre/store/checks.h"

namespace cadre {

HashStore::HashStore(os::System& system) : HashStore(system, std::make_shared<State>()) {}

HashStore::HashStore(os::System& system, std::shared_ptr<State> state)
    : system_(system), state_(std::move(state)) {}

Status HashStore::set(std::string_view key, std::string_view value, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(key, value));
  const std::lock_guard lock(state_->mutex);
  CADRE_RETURN_IF_ERROR(state_->table.set(std::string(key), std::string(value)));
  wake_ready();
  return {};
}

Result<std::string> HashStore::get(std::string_view key, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(key));
  const std::string wanted(key);
  std::unique_lock lock(state_->mutex);
  CADRE_RETURN_IF_ERROR(wait_for("get", std::span(&wanted, 1), deadline, lock));
  return state_->table.read(wanted);
}

Result<int64_t> HashStore::add(std::string_view key, int64_t amount, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(key));
  const std::lock_guard lock(state_->mutex);
  Result<int64_t> sum = state_->table.add(std::string(key), amount);
  wake_ready();
  return sum;
}

Status HashStore::wait(std::span<const std::string> keys, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_keys(keys));
  std::unique_lock lock(state_->mutex);
  return wait_for("wait", keys, deadline, lock);
}

Result<bool> HashStore::check(std::span<const std::string> keys, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_keys(keys));
  const std::lock_guard lock(state_->mutex);
  return state_->table.has_all(keys);
}

Result<std::string> HashStore::compare_set(std::string_view key, std::string_view expected,
                                           std::string_view desired, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(key, expected));
  CADRE_RETURN_IF_ERROR(check_store_entry(key, desired));
  const std::lock_guard lock(state_->mutex);
  Result<std::string> value =
      state_->table.compare_set(std::string(key), std::string(expected), std::string(desired));
  wake_ready();
  return value;
}

Result<bool> HashStore::erase(std::string_view key, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(key));
  const std::lock_guard lock(state_->mutex);
  return state_->table.erase(std::string(key));
}

Result<int64_t> HashStore::num_keys(Deadline) {
  const std::lock_guard lock(state_->mutex);
  return state_->table.num_keys();
}

Status HashStore::append(std::string_view key, std::string_view value, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(key, value));
  const std::lock_guard lock(state_->mutex);
  CADRE_RETURN_IF_ERROR(state_->table.append(std::string(key), value));
  wake_ready();
  return {};
}

Result<std::vector<std::string>> HashStore::multi_get(std::span<const std::string> keys,
                                                      Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_keys(keys));
  std::unique_lock lock(state_->mutex);
  CADRE_RETURN_IF_ERROR(wait_for("multi_get", keys, deadline, lock));
  std::vector<std::string> values;
  values.reserve(keys.size());
  for (const std::string& key : keys) {
    Result<std::string> value = state_->table.read(key);
    if (!value.ok()) return value.error();
    values.push_back(std::move(value).value());
  }
  return values;
}

Status HashStore::multi_set(std::span<const std::string> keys, std::span<const std::string> values,
                            Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entries(keys, values));
  const std::lock_guard lock(state_->mutex);
  for (size_t i = 0; i < keys.size(); ++i) {
    CADRE_RETURN_IF_ERROR(state_->table.set(keys[i], values[i]));
  }
  wake_ready();
  return {};
}

Result<std::vector<std::string>> HashStore::list_keys(Deadline) {
  const std::lock_guard lock(state_->mutex);
  return state_->table.list_keys();
}

Status HashStore::queue_push(std::string_view queue, std::string_view value, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(queue, value));
  const std::lock_guard lock(state_->mutex);
  CADRE_RETURN_IF_ERROR(state_->table.push(std::string(queue), std::string(value)));
  wake_ready();
  return {};
}

Result<std::string> HashStore::queue_pop(std::string_view queue, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(queue));
  const std::string name(queue);
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  std::unique_lock lock(state_->mutex);
  const KeyTable::Ticket ticket = state_->next_ticket++;
  if (auto item = state_->table.pop_or_wait(ticket, name)) return *std::move(item);
  park(ticket, *waiter, deadline, lock);
  if (auto item = state_->table.take_item(ticket)) return *std::move(item);
  state_->table.cancel(ticket);
  return store_timeout("queue_pop", std::span(&name, 1));
}

Result<std::optional<std::string>> HashStore::try_queue_pop(std::string_view queue, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(queue));
  const std::lock_guard lock(state_->mutex);
  return state_->table.pop(std::string(queue));
}

Result<int64_t> HashStore::queue_length(std::string_view queue, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(queue));
  const std::lock_guard lock(state_->mutex);
  return state_->table.queue_length(std::string(queue));
}

Status HashStore::barrier(std::string_view key, int64_t num_arrivals, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_barrier(key, num_arrivals));
  const std::string name(key);
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  std::unique_lock lock(state_->mutex);
  const KeyTable::Ticket ticket = state_->next_ticket++;
  const Result<bool> arrived = state_->table.arrive(ticket, name, num_arrivals);
  if (!arrived.ok()) return arrived.error();
  wake_ready();
  if (*arrived) return {};
  park(ticket, *waiter, deadline, lock);
  if (!state_->table.is_waiting(ticket)) return {};
  state_->table.cancel(ticket);
  return store_timeout("barrier", std::span(&name, 1));
}

Result<std::shared_ptr<Store>> HashStore::clone(Deadline) {
  return std::shared_ptr<Store>(std::make_shared<HashStore>(system_, state_));
}

Status HashStore::wait_for(std::string_view verb, std::span<const std::string> keys,
                           Deadline deadline, std::unique_lock<std::mutex>& lock) {
  if (state_->table.has_all(keys)) return {};
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  const std::vector<std::string> wanted(keys.begin(), keys.end());
  while (true) {
    const KeyTable::Ticket ticket = state_->next_ticket++;
    if (state_->table.wait(ticket, wanted)) return {};
    const bool unparked = park(ticket, *waiter, deadline, lock);
    state_->table.cancel(ticket);
    const std::string* missing = state_->table.first_missing(keys);
    if (!missing) return {};
    if (!unparked) return store_timeout(verb, {missing, 1});
  }
}

bool HashStore::park(KeyTable::Ticket ticket, os::Waiter& waiter, Deadline deadline,
                     std::unique_lock<std::mutex>& lock) {
  state_->waiters.emplace(ticket, &waiter);
  lock.unlock();
  const auto leave = [&] {
    // Taking the lock again also means that the thread that unparks is done with the Waiter.
    lock.lock();
    state_->waiters.erase(ticket);
  };
  bool unparked = false;
  try {
    unparked = waiter.park(deadline);
  } catch (...) {
    // A rank that the simulator kills here must not leave its waiter to those that live on.
    leave();
    state_->table.cancel(ticket);
    throw;
  }
  leave();
  return unparked;
}

void HashStore::wake_ready() {
  for (const KeyTable::Ticket ticket : state_->table.take_ready()) {
    const auto waiter = state_->waiters.find(ticket);
    if (waiter != state_->waiters.end()) waiter->second->unpark();
  }
}

}  // namespace cadre
