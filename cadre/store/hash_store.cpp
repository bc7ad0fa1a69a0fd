#include "cadre/store/hash_store.h"

#include "cadre/store/checks.h"

namespace cadre {

Status HashStore::set(std::string_view key, std::string_view value, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(key, value));
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(table_.set(std::string(key), std::string(value)));
  wake_ready();
  return {};
}

Result<std::string> HashStore::get(std::string_view key, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(key));
  const std::string wanted(key);
  std::unique_lock lock(mutex_);
  CADRE_RETURN_IF_ERROR(wait_for("get", std::span(&wanted, 1), deadline, lock));
  return *table_.find(wanted);
}

Result<int64_t> HashStore::add(std::string_view key, int64_t amount, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(key));
  const std::lock_guard lock(mutex_);
  Result<int64_t> sum = table_.add(std::string(key), amount);
  wake_ready();
  return sum;
}

Status HashStore::wait(std::span<const std::string> keys, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_keys(keys));
  std::unique_lock lock(mutex_);
  return wait_for("wait", keys, deadline, lock);
}

Result<bool> HashStore::check(std::span<const std::string> keys, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_keys(keys));
  const std::lock_guard lock(mutex_);
  return table_.has_all(keys);
}

Result<std::string> HashStore::compare_set(std::string_view key, std::string_view expected,
                                           std::string_view desired, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(key, expected));
  CADRE_RETURN_IF_ERROR(check_store_entry(key, desired));
  const std::lock_guard lock(mutex_);
  Result<std::string> value =
      table_.compare_set(std::string(key), std::string(expected), std::string(desired));
  wake_ready();
  return value;
}

Result<bool> HashStore::erase(std::string_view key, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_key(key));
  const std::lock_guard lock(mutex_);
  return table_.erase(std::string(key));
}

Result<int64_t> HashStore::num_keys(Deadline) {
  const std::lock_guard lock(mutex_);
  return table_.num_keys();
}

Status HashStore::append(std::string_view key, std::string_view value, Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entry(key, value));
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(table_.append(std::string(key), value));
  wake_ready();
  return {};
}

Result<std::vector<std::string>> HashStore::multi_get(std::span<const std::string> keys,
                                                      Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_keys(keys));
  std::unique_lock lock(mutex_);
  CADRE_RETURN_IF_ERROR(wait_for("multi_get", keys, deadline, lock));
  std::vector<std::string> values;
  values.reserve(keys.size());
  for (const std::string& key : keys) values.push_back(*table_.find(key));
  return values;
}

Status HashStore::multi_set(std::span<const std::string> keys, std::span<const std::string> values,
                            Deadline) {
  CADRE_RETURN_IF_ERROR(check_store_entries(keys, values));
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < keys.size(); ++i) {
    CADRE_RETURN_IF_ERROR(table_.set(keys[i], values[i]));
  }
  wake_ready();
  return {};
}

Status HashStore::wait_for(std::string_view verb, std::span<const std::string> keys,
                           Deadline deadline, std::unique_lock<std::mutex>& lock) {
  if (table_.has_all(keys)) return {};
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  const std::vector<std::string> wanted(keys.begin(), keys.end());
  while (true) {
    const KeyTable::Ticket ticket = next_ticket_++;
    if (table_.wait(ticket, wanted)) return {};
    waiters_.emplace(ticket, waiter.get());
    const auto leave = [&] {
      // Taking the lock again also means that the thread that unparks is done with the Waiter.
      lock.lock();
      waiters_.erase(ticket);
      table_.cancel(ticket);
    };
    lock.unlock();
    bool unparked = false;
    try {
      unparked = waiter->park(deadline);
    } catch (...) {
      // A rank that the simulator kills here must not leave its waiter to those that live on.
      leave();
      throw;
    }
    leave();
    const std::string* missing = table_.first_missing(keys);
    if (!missing) return {};
    if (!unparked) return store_timeout(verb, {missing, 1});
  }
}

void HashStore::wake_ready() {
  for (const KeyTable::Ticket ticket : table_.take_ready()) waiters_.at(ticket)->unpark();
}

}  // namespace cadre
