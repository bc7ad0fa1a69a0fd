// The keys and values of one store and the pending waits for them: a passive table with no lock, no
// clock and no socket. HashStore, FileStore and TcpStoreServer use it.
//
// Threads: one at a time; the owner locks. Blocking: never; a pending wait is a Ticket that becomes
// ready later. Lifetime: returned views hold until the next change of the table.
// Errors: kInvalidArgument if a counter is no number, or if a value would exceed
// kMaxStoreValueBytes or the table its limit of bytes.
// Source: the verbs are those of c10d's TCPStore server, with queues and barrier.
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
  // Identifies one pending wait. The owner of the table chooses the number; no two pending waits
  // have the same number.
  using Ticket = uint64_t;

  static constexpr size_t kDefaultMaxBytes = size_t{1} << 30;

  // `max_bytes` bounds the sum of all keys, values and queued items.
  explicit KeyTable(size_t max_bytes = kDefaultMaxBytes) : max_bytes_(max_bytes) {}

  Status set(const std::string& key, std::string value);
  // Returns null if the key is absent.
  const std::string* find(const std::string& key) const;
  // Returns the value of a key; kInvalidArgument if the name is that of a queue, which has no
  // value. REQUIRES: has_all() is true for the key.
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

  // Queues are first in, first out. A push assigns the item to the oldest ticket of pop_or_wait()
  // on this queue, if there is one.
  Status push(const std::string& queue, std::string value);
  std::optional<std::string> pop(const std::string& queue);
  // Returns the first item. If the queue is empty, returns nullopt, and the ticket becomes ready
  // once an item is assigned to it (see take_item).
  std::optional<std::string> pop_or_wait(Ticket ticket, const std::string& queue);
  // Returns the item that was assigned to a ticket of pop_or_wait(); a second call returns nullopt.
  // If the ticket is cancelled before this call, the item goes back to the front of the queue.
  std::optional<std::string> take_item(Ticket ticket);
  int64_t queue_length(const std::string& queue) const;

  // Says which waits a push wakes. kAlways: every push to the queue wakes the wait. kOnePerPush:
  // each push wakes only one of these waits, because a c10d client that waits for a queue will pop
  // an item.
  enum class Wake { kAlways, kOnePerPush };
  // Returns true if has_all(keys); else the ticket becomes ready once has_all(keys) is true.
  bool wait(Ticket ticket, std::vector<std::string> keys, Wake wake = Wake::kAlways);
  // Counts an arrival at the barrier `key`. Returns true if `num_arrivals` calls have arrived now;
  // else the ticket waits. The tickets of earlier calls whose number of arrivals is now reached
  // become ready.
  Result<bool> arrive(Ticket ticket, const std::string& key, int64_t num_arrivals);
  bool is_waiting(Ticket ticket) const { return waits_.contains(ticket); }
  // Forgets a pending ticket; ignores unknown tickets.
  void cancel(Ticket ticket);
  // Returns the tickets that became ready since the last call, in the order in which they became
  // ready.
  std::vector<Ticket> take_ready();

 private:
  enum class Kind { kKeys, kPop, kBarrier };
  struct Wait {
    std::vector<std::string> keys;
    // Every key before this index was set when it was last checked. parked_ has the ticket under
    // keys[cursor], the first missing key.
    size_t cursor = 0;
    Kind kind = Kind::kKeys;
    Wake wake = Wake::kAlways;
    int64_t num_arrivals = 0;  // the number of arrivals for which a barrier waits
  };
  // An item that was assigned to a ticket and not yet returned by take_item().
  struct Delivery {
    std::string queue;
    std::string item;
  };

  // The bytes that the table counts for every key and queued item in addition to its content, so
  // that the limit on bytes also limits the memory for entries.
  static constexpr size_t kEntryBytes = 64;

  Status reserve(const std::string& key, size_t old_bytes, size_t new_bytes);
  // Moves the wait to its next missing key. Returns true if no key is missing.
  bool advance(Wait& wait) const;
  void key_appeared(const std::string& key);
  // Removes from parked_ and returns the oldest ticket that will pop an item of `queue` (of
  // pop_or_wait(), or of a wait() with kOnePerPush); tickets that only wait until the queue has an
  // item stay. Returns nullopt if no ticket asks for a pop.
  std::optional<Ticket> first_popper(const std::string& queue);
  // Wakes the first ticket that asks for a pop, if that ticket waits for no other key.
  // REQUIRES: the queue is not empty.
  void wake_popper(const std::string& queue);
  void wake_watchers(const std::string& queue);
  // Makes all tickets ready that wait at the barrier `key` for `count` or fewer arrivals.
  void end_barriers(const std::string& key, int64_t count);
  void unpark(Ticket ticket);

  size_t max_bytes_;
  size_t num_bytes_ = 0;
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::deque<std::string>> queues_;
  std::map<Ticket, Wait> waits_;
  std::map<Ticket, Delivery> deliveries_;
  // The tickets of pending waits, the oldest first. The key of the map is the store key or queue
  // for which they wait.
  std::unordered_map<std::string, std::vector<Ticket>> parked_;
  std::vector<Ticket> ready_;
};

}  // namespace cadre::store
