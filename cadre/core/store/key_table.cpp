#include "cadre/core/store/key_table.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/store/store.h"

namespace cadre::store {
namespace {

Result<int64_t> parse_counter(const std::string& key, const std::string& text) {
  int64_t number = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (code == std::errc() && end == text.data() + text.size()) return number;
  return Error(ErrorCode::kInvalidArgument,
               format("store key \"{}\" holds \"{}\", which is not a decimal 64-bit counter; use "
                      "one key either as a value or as a counter",
                      key, std::string_view(text).substr(0, 64)));
}

}  // namespace

Status KeyTable::reserve(const std::string& key, size_t old_bytes, size_t new_bytes) {
  // The table may be larger than its limit, because cancel() puts an item back even if the table is
  // full.
  const size_t num_free = max_bytes_ - std::min(num_bytes_, max_bytes_);
  if (new_bytes > old_bytes && new_bytes - old_bytes > num_free) {
    return Error(ErrorCode::kInvalidArgument,
                 format("store is full: key \"{}\" needs {} more bytes, {} of {} are in use; erase "
                        "keys that are no longer read",
                        key, new_bytes - old_bytes, num_bytes_, max_bytes_));
  }
  num_bytes_ = num_bytes_ - old_bytes + new_bytes;
  return {};
}

Status KeyTable::set(const std::string& key, std::string value) {
  const auto found = values_.find(key);
  if (found != values_.end()) {
    CADRE_RETURN_IF_ERROR(reserve(key, found->second.size(), value.size()));
    found->second = std::move(value);
    return {};
  }
  CADRE_RETURN_IF_ERROR(reserve(key, 0, key.size() + value.size() + kEntryBytes));
  values_.emplace(key, std::move(value));
  key_appeared(key);
  return {};
}

const std::string* KeyTable::find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

Result<std::string> KeyTable::read(const std::string& key) const {
  if (const std::string* value = find(key)) return *value;
  return Error(ErrorCode::kInvalidArgument,
               format("store key \"{}\" names a queue of {} items, which has no value; take its "
                      "items by queue_pop",
                      key, queue_length(key)));
}

Result<int64_t> KeyTable::add(const std::string& key, int64_t amount) {
  int64_t sum = amount;
  if (const std::string* text = find(key)) {
    const Result<int64_t> old = parse_counter(key, *text);
    if (!old.ok()) return old.error();
    if (__builtin_add_overflow(*old, amount, &sum)) {
      return Error(
          ErrorCode::kInvalidArgument,
          format("store counter \"{}\" at {} would overflow by adding {}", key, *old, amount));
    }
  }
  CADRE_RETURN_IF_ERROR(set(key, std::to_string(sum)));
  return sum;
}

Result<std::string> KeyTable::compare_set(const std::string& key, const std::string& expected,
                                          const std::string& desired) {
  const std::string* current = find(key);
  const bool matches = current ? *current == expected : expected.empty();
  if (!matches) return current ? *current : expected;
  CADRE_RETURN_IF_ERROR(set(key, desired));
  return desired;
}

Status KeyTable::append(const std::string& key, std::string_view value) {
  const auto found = values_.find(key);
  if (found == values_.end()) return set(key, std::string(value));
  if (value.size() > kMaxStoreValueBytes - found->second.size()) {
    return Error(ErrorCode::kInvalidArgument,
                 format("appending {} bytes to store key \"{}\" of {} bytes would pass the limit "
                        "of {} bytes",
                        value.size(), key, found->second.size(), kMaxStoreValueBytes));
  }
  CADRE_RETURN_IF_ERROR(reserve(key, 0, value.size()));
  found->second.append(value);
  return {};
}

bool KeyTable::erase(const std::string& key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return false;
  num_bytes_ -= key.size() + found->second.size() + kEntryBytes;
  values_.erase(found);
  return true;
}

std::vector<std::string> KeyTable::list_keys() const {
  std::vector<std::string> keys;
  keys.reserve(values_.size());
  for (const auto& [key, value] : values_) keys.push_back(key);
  // Sorted, so that callers do not depend on the order of a hash table.
  std::sort(keys.begin(), keys.end());
  return keys;
}

bool KeyTable::has_all(std::span<const std::string> keys) const {
  return first_missing(keys) == nullptr;
}

const std::string* KeyTable::first_missing(std::span<const std::string> keys) const {
  for (const std::string& key : keys) {
    if (!values_.contains(key) && queue_length(key) == 0) return &key;
  }
  return nullptr;
}

Status KeyTable::push(const std::string& queue, std::string value) {
  const std::optional<Ticket> popper = first_popper(queue);
  if (popper && waits_.at(*popper).kind == Kind::kPop) {
    waits_.erase(*popper);
    deliveries_.emplace(*popper, Delivery{queue, std::move(value)});
    ready_.push_back(*popper);
    return {};
  }
  const Status reserved = reserve(queue, 0, queue.size() + value.size() + kEntryBytes);
  if (!reserved.ok()) {
    if (popper) parked_[queue].insert(parked_[queue].begin(), *popper);
    return reserved;
  }
  queues_[queue].push_back(std::move(value));
  if (popper) unpark(*popper);
  if (popper && is_waiting(*popper)) wake_popper(queue);
  wake_watchers(queue);
  return {};
}

void KeyTable::wake_popper(const std::string& queue) {
  while (const std::optional<Ticket> popper = first_popper(queue)) {
    if (waits_.at(*popper).kind == Kind::kPop) {
      waits_.erase(*popper);
      deliveries_.emplace(*popper, Delivery{queue, pop(queue).value_or(std::string())});
      ready_.push_back(*popper);
      return;
    }
    unpark(*popper);
    if (!is_waiting(*popper)) return;
  }
}

std::optional<KeyTable::Ticket> KeyTable::first_popper(const std::string& queue) {
  const auto parked = parked_.find(queue);
  if (parked == parked_.end()) return std::nullopt;
  const auto is_popper = [this](Ticket ticket) {
    const Wait& wait = waits_.at(ticket);
    return wait.kind == Kind::kPop || (wait.kind == Kind::kKeys && wait.wake == Wake::kOnePerPush);
  };
  const auto first = std::find_if(parked->second.begin(), parked->second.end(), is_popper);
  if (first == parked->second.end()) return std::nullopt;
  const Ticket ticket = *first;
  parked->second.erase(first);
  if (parked->second.empty()) parked_.erase(parked);
  return ticket;
}

void KeyTable::wake_watchers(const std::string& queue) {
  const auto parked = parked_.find(queue);
  if (parked == parked_.end()) return;
  const std::vector<Ticket> tickets = std::move(parked->second);
  parked_.erase(parked);
  for (const Ticket ticket : tickets) {
    const Wait& wait = waits_.at(ticket);
    if (wait.kind == Kind::kKeys && wait.wake == Wake::kAlways) {
      unpark(ticket);
    } else {
      parked_[queue].push_back(ticket);
    }
  }
}

std::optional<std::string> KeyTable::pop(const std::string& queue) {
  const auto found = queues_.find(queue);
  if (found == queues_.end()) return std::nullopt;
  std::string value = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) queues_.erase(found);
  num_bytes_ -= queue.size() + value.size() + kEntryBytes;
  return value;
}

std::optional<std::string> KeyTable::pop_or_wait(Ticket ticket, const std::string& queue) {
  if (auto item = pop(queue)) return item;
  parked_[queue].push_back(ticket);
  waits_.emplace(ticket, Wait{.keys = {queue}, .kind = Kind::kPop});
  return std::nullopt;
}

std::optional<std::string> KeyTable::take_item(Ticket ticket) {
  const auto found = deliveries_.find(ticket);
  if (found == deliveries_.end()) return std::nullopt;
  std::string item = std::move(found->second.item);
  deliveries_.erase(found);
  return item;
}

int64_t KeyTable::queue_length(const std::string& queue) const {
  const auto found = queues_.find(queue);
  return found == queues_.end() ? 0 : static_cast<int64_t>(found->second.size());
}

bool KeyTable::wait(Ticket ticket, std::vector<std::string> keys, Wake wake) {
  Wait wait{.keys = std::move(keys), .wake = wake};
  if (advance(wait)) return true;
  parked_[wait.keys[wait.cursor]].push_back(ticket);
  waits_.emplace(ticket, std::move(wait));
  return false;
}

Result<bool> KeyTable::arrive(Ticket ticket, const std::string& key, int64_t num_arrivals) {
  const Result<int64_t> count = add(key, 1);
  if (!count.ok()) return count.error();
  end_barriers(key, *count);
  if (*count >= num_arrivals) return true;
  parked_[key].push_back(ticket);
  waits_.emplace(ticket, Wait{.keys = {key}, .kind = Kind::kBarrier, .num_arrivals = num_arrivals});
  return false;
}

void KeyTable::end_barriers(const std::string& key, int64_t count) {
  const auto parked = parked_.find(key);
  if (parked == parked_.end()) return;
  const std::vector<Ticket> tickets = std::move(parked->second);
  parked_.erase(parked);
  for (const Ticket waiting : tickets) {
    const Wait& wait = waits_.at(waiting);
    if (wait.kind != Kind::kBarrier || wait.num_arrivals > count) {
      parked_[key].push_back(waiting);
      continue;
    }
    waits_.erase(waiting);
    ready_.push_back(waiting);
  }
}

void KeyTable::cancel(Ticket ticket) {
  const auto found = waits_.find(ticket);
  if (found != waits_.end()) {
    const auto parked = parked_.find(found->second.keys[found->second.cursor]);
    std::erase(parked->second, ticket);
    if (parked->second.empty()) parked_.erase(parked);
    waits_.erase(found);
  }
  std::erase(ready_, ticket);
  const auto delivery = deliveries_.find(ticket);
  if (delivery == deliveries_.end()) return;
  const Delivery given = std::move(delivery->second);
  deliveries_.erase(delivery);
  // The item was the oldest of its queue, so it is assigned to the next ticket (pending wait) that
  // asks for an item, or goes back to the front of the queue.
  const std::optional<Ticket> popper = first_popper(given.queue);
  if (popper && waits_.at(*popper).kind == Kind::kPop) {
    waits_.erase(*popper);
    deliveries_.emplace(*popper, given);
    ready_.push_back(*popper);
    return;
  }
  num_bytes_ += given.queue.size() + given.item.size() + kEntryBytes;
  queues_[given.queue].push_front(given.item);
  if (popper) unpark(*popper);
  if (popper && is_waiting(*popper)) wake_popper(given.queue);
  wake_watchers(given.queue);
}

std::vector<KeyTable::Ticket> KeyTable::take_ready() {
  return std::exchange(ready_, {});
}

bool KeyTable::advance(Wait& wait) const {
  const auto missing_from = [&](size_t begin) {
    const std::span<const std::string> rest = std::span(wait.keys).subspan(begin);
    const std::string* key = first_missing(rest);
    return key ? begin + static_cast<size_t>(key - rest.data()) : wait.keys.size();
  };
  // The scan starts at the cursor, so that a wait for n keys costs about n look-ups and not n^2.
  // The second scan, from the start, finds keys that were erased meanwhile.
  wait.cursor = missing_from(wait.cursor);
  if (wait.cursor == wait.keys.size()) wait.cursor = missing_from(0);
  return wait.cursor == wait.keys.size();
}

void KeyTable::key_appeared(const std::string& key) {
  const auto parked = parked_.find(key);
  if (parked == parked_.end()) return;
  const std::vector<Ticket> tickets = std::move(parked->second);
  parked_.erase(parked);
  for (const Ticket ticket : tickets) unpark(ticket);
}

void KeyTable::unpark(Ticket ticket) {
  const auto found = waits_.find(ticket);
  Wait& wait = found->second;
  if (wait.kind == Kind::kKeys && advance(wait)) {
    waits_.erase(found);
    ready_.push_back(ticket);
  } else {
    parked_[wait.keys[wait.cursor]].push_back(ticket);
  }
}

}  // namespace cadre::store
