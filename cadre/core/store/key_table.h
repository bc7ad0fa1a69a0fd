// The keys and values of one store and the waits for them: a passive table with no lock, no clock
// and no socket, shared by HashStore and TcpStoreServer.
//
// Threads: one at a time; the owner locks. Blocking: never; a wait is a Ticket that becomes ready.
// Lifetime: returned views hold until the next change of the table.
// Errors: kInvalidArgument for a counter that is no number, a value grown over
// kMaxStoreValueBytes, or a table over its limit of bytes.
// Source: the verbs are c10d's TCPStore daemon, its queues and barrier included.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cadre/core/base/error.h"

namespace cadre::store {

class KeyTable {
 public:
  // Identifies one pending wait. The owner chooses it; no two pending waits have the same.
  using Ticket = uint64_t;

  static constexpr size_t kDefaultMaxBytes = size_t{1} << 30;

  // `max_bytes` bounds the sum of all keys, values and queued items.
  explicit KeyTable(size_t max_bytes = kDefaultMaxBytes) : max_bytes_(max_bytes) {}

  Status set(const std::string& key, std::string value);
  // Returns null if the key is absent.
  const std::string* find(const std::string& key) const;
  // Returns the value of a key that has_all() finds; kInvalidArgument if the key is a queue, which
  // has no value.
  Result<std::string> read(const std::string& key) const;
  Result<int64_t> add(const std::string& key, int64_t amount);
  Result<std::string> compare_set(const std::string& key, const std::string& expected,
                                  const std::string& desired);
  Status append(const std::string& key, std::string_view value);
  bool erase(const std::string& key);
  int64_t num_keys() const { return static_cast<int64_t>(values_.size()); }
  std::vector<std::string> list_keys() const;
  // Returns whether every key is set or names a queue that is not empty.
  bool has_all(std::span<const std::string> keys) const;
  // Returns the first key for which has_all() is false; nullptr if there is none.
  const std::string* first_missing(std::span<const std::string> keys) const;

  // Queues are first in, first out. A push serves one ticket: the oldest that waits to pop gets the
  // item itself.
  Status push(const std::string& queue, std::string value);
  std::optional<std::string> pop(const std::string& queue);
  // Returns the first item. If the queue is empty, the ticket becomes ready once it has been given
  // an item (take_item).
  std::optional<std::string> pop_or_wait(Ticket ticket, const std::string& queue);
  // Returns the item that a ticket of pop_or_wait() was given, once. Cancelling the ticket instead
  // puts the item back where it was.
  std::optional<std::string> take_item(Ticket ticket);
  int64_t queue_length(const std::string& queue) const;

  // With kAlways, every push to an awaited queue wakes the wait. With kOnePerPush, each push wakes
  // one of these waits, because a c10d client that waits for a queue is going to pop.
  enum class Wake { kAlways, kOnePerPush };
  // Returns true if all keys are there; else the ticket becomes ready once they are.
  bool wait(Ticket ticket, std::vector<std::string> keys, Wake wake = Wake::kAlways);
  // Counts an arrival at `key`. Returns true if it is the last of `num_arrivals`; else the ticket
  // waits. The tickets of earlier calls that wait for no more arrivals become ready.
  Result<bool> arrive(Ticket ticket, const std::string& key, int64_t num_arrivals);
  bool is_waiting(Ticket ticket) const { return waits_.contains(ticket); }
  // Forgets a pending ticket; ignores unknown tickets.
  void cancel(Ticket ticket);
  // Returns the tickets that became ready since the last call, in that order.
  std::vector<Ticket> take_ready();

 private:
  enum class Kind { kKeys, kPop, kBarrier };
  struct Wait {
    std::vector<std::string> keys;
    // Every key before this index was seen; the ticket is parked on keys[cursor].
    size_t cursor = 0;
    Kind kind = Kind::kKeys;
    Wake wake = Wake::kAlways;
    int64_t num_arrivals = 0;  // the ranks that have arrived at a barrier
  };
  // An item that was given to a ticket, which has not taken it yet.
  struct Delivery {
    std::string queue;
    std::string item;
  };

  // The table counts this many bytes for every key and queued item, beside the item's own, so that
  // a limit on bytes limits memory.
  static constexpr size_t kEntryBytes = 64;

  Status reserve(const std::string& key, size_t old_bytes, size_t new_bytes);
  // Moves the wait to its next missing key. Returns true if no key is missing.
  bool advance(Wait& wait) const;
  void key_appeared(const std::string& key);
  // Removes and returns the first of the tickets parked on `queue` that is going to pop; nullopt if
  // there is none.
  std::optional<Ticket> first_popper(const std::string& queue);
  // Wakes the first ticket that is going to pop and waits for nothing else. REQUIRES: the queue is
  // not empty.
  void wake_popper(const std::string& queue);
  void wake_watchers(const std::string& queue);
  // Makes the tickets ready that wait at `key` for at most `count` arrivals.
  void end_barriers(const std::string& key, int64_t count);
  void unpark(Ticket ticket);

  size_t max_bytes_;
  size_t num_bytes_ = 0;
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::deque<std::string>> queues_;
  std::map<Ticket, Wait> waits_;
  std::map<Ticket, Delivery> deliveries_;
  // The parked tickets, of which the oldest comes first; the key is the store key on which they are
  // parked.
  std::unordered_map<std::string, std::vector<Ticket>> parked_;
  std::vector<Ticket> ready_;
};

}  // namespace cadre::store
