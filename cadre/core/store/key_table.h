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
  // Names one pending wait; chosen by the owner, unique among the pending ones.
  using Ticket = uint64_t;

  static constexpr size_t kDefaultMaxBytes = size_t{1} << 30;

  // `max_bytes` bounds the sum of all keys, values and queued items.
  explicit KeyTable(size_t max_bytes = kDefaultMaxBytes) : max_bytes_(max_bytes) {}

  Status set(const std::string& key, std::string value);
  // Null when absent.
  const std::string* find(const std::string& key) const;
  // The value of a key that has_all() finds; kInvalidArgument when it is a queue, which has none.
  Result<std::string> read(const std::string& key) const;
  Result<int64_t> add(const std::string& key, int64_t amount);
  Result<std::string> compare_set(const std::string& key, const std::string& expected,
                                  const std::string& desired);
  Status append(const std::string& key, std::string_view value);
  bool erase(const std::string& key);
  int64_t num_keys() const { return static_cast<int64_t>(values_.size()); }
  std::vector<std::string> list_keys() const;
  // Whether every key is set or names a queue that is not empty.
  bool has_all(std::span<const std::string> keys) const;
  // The first key that has_all() misses; nullptr when none.
  const std::string* first_missing(std::span<const std::string> keys) const;

  // First in, first out. A push serves one: the oldest that waits to pop gets the item itself.
  Status push(const std::string& queue, std::string value);
  std::optional<std::string> pop(const std::string& queue);
  // The first item; if there is none, the ticket becomes ready once it has one (take_item).
  std::optional<std::string> pop_or_wait(Ticket ticket, const std::string& queue);
  // What a ticket of pop_or_wait() was given; once. Cancelling the ticket instead puts the item
  // back where it was.
  std::optional<std::string> take_item(Ticket ticket);
  int64_t queue_length(const std::string& queue) const;

  // Whether a push wakes this wait always, or as one of those of whom each push wakes one: a c10d
  // client that waits for a queue is going to pop.
  enum class Wake { kAlways, kOnePerPush };
  // True when all keys are there; else the ticket becomes ready once they are.
  bool wait(Ticket ticket, std::vector<std::string> keys, Wake wake = Wake::kAlways);
  // Counts an arrival at `key`. True when it is the last of `num_arrivals`, whose tickets all
  // become ready; else the ticket waits.
  Result<bool> arrive(Ticket ticket, const std::string& key, int64_t num_arrivals);
  bool is_waiting(Ticket ticket) const { return waits_.contains(ticket); }
  // Forgets a pending ticket; unknown ones are ignored.
  void cancel(Ticket ticket);
  // Tickets that became ready since the last call, in the order of becoming so.
  std::vector<Ticket> take_ready();

 private:
  enum class Kind { kKeys, kPop, kBarrier };
  struct Wait {
    std::vector<std::string> keys;
    size_t cursor = 0;  // every key before it was seen; the ticket is parked on keys[cursor]
    Kind kind = Kind::kKeys;
    Wake wake = Wake::kAlways;
  };
  // An item handed to a ticket that has not taken it yet.
  struct Delivery {
    std::string queue;
    std::string item;
  };

  // Counted for every key and queued item beside its bytes, so that a bound on bytes bounds memory.
  static constexpr size_t kEntryBytes = 64;

  Status reserve(const std::string& key, size_t old_bytes, size_t new_bytes);
  // Moves the wait to its next missing key. True when there is none.
  bool advance(Wait& wait) const;
  void key_appeared(const std::string& key);
  // Takes the first of the tickets parked on `queue` that is there to pop; nullopt when none is.
  std::optional<Ticket> first_popper(const std::string& queue);
  void wake_watchers(const std::string& queue);
  void unpark(Ticket ticket);

  size_t max_bytes_;
  size_t num_bytes_ = 0;
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::deque<std::string>> queues_;
  std::map<Ticket, Wait> waits_;
  std::map<Ticket, Delivery> deliveries_;
  // Tickets by the key they are parked on, oldest first.
  std::unordered_map<std::string, std::vector<Ticket>> parked_;
  std::vector<Ticket> ready_;
};

}  // namespace cadre::store
