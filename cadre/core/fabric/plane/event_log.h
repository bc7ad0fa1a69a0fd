// The events that a process has received: which ranks are lost or have left the job, and recent
// leaves and failures of groups. The log tells new events from duplicates.
//
// Threads: one at a time; PlaneState guards the log with its mutex. Blocking: never. Errors: none.
// Losses and leaves of ranks are never removed. Events of groups are kept for 60 s, and at most
// 65,536 of them. The identities of these events are kept for at least 60 s, and the latest 131,072
// identities longer, so that a duplicate that arrives over a slower path is recognized.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/fabric/plane/group_events.h"

namespace cadre {

class EventLog {
 public:
  static constexpr Duration kMaxAge = std::chrono::seconds(60);
  static constexpr size_t kMaxEntries = 65'536;
  static constexpr int kOwn = -1;

  EventLog(int num_ranks, int self);

  // Returns true if the event is new. `from` is the rank that sent it, or kOwn. Ignores status
  // questions and answers, events of ranks that do not exist, and a loss that this rank itself
  // reports of a rank that has left.
  bool add(const wire::Event& event, int from, TimePoint now);

  bool is_lost(int rank) const { return ranks_[static_cast<size_t>(rank)].loss.has_value(); }
  bool has_left(int rank) const { return ranks_[static_cast<size_t>(rank)].has_left; }
  // Returns a flag for each rank: true if the rank is neither lost nor left. The flag of this rank
  // is always true.
  std::vector<bool> presence() const;
  const std::optional<LossReport>& loss_of(int rank) const {
    return ranks_[static_cast<size_t>(rank)].loss;
  }
  // Returns the lost ranks in ascending order, without this rank.
  std::vector<int> lost_ranks() const;

  // Returns all events that are kept. They are sent over each new connection.
  std::vector<wire::Event> all(TimePoint now);
  // Returns the events that this process has received from the rank.
  std::vector<wire::Event> told_by(int rank, TimePoint now);
  // Returns the events that concern a group: losses of any rank, the leaves of its members, its
  // failure.
  std::vector<wire::Event> of_group(GroupKey group, TimePoint now);

 private:
  struct RankState {
    std::optional<LossReport> loss;
    bool has_left = false;
    int loss_from = kOwn;
    int leave_from = kOwn;
  };
  struct Entry {
    wire::Event event;
    int from = kOwn;
    TimePoint at;
  };
  // The identity of an event is its type, the group and the rank.
  using Identity = std::tuple<size_t, GroupKey, int>;

  bool exists(int rank) const { return rank >= 0 && static_cast<size_t>(rank) < ranks_.size(); }
  bool add_loss(const LossReport& loss, int from);
  bool add_leave(int rank, int from);
  bool add_entry(const wire::Event& event, Identity identity, int from, TimePoint now);
  void prune(TimePoint now);
  void drop_oldest();
  std::vector<wire::Event> events_of_ranks() const;

  const int self_;
  std::vector<RankState> ranks_;
  std::deque<Entry> entries_;  // the events of groups, in the order in which they arrived
  // The numbers of the entries of each group, so that of_group() need not search the events of all
  // groups.
  std::unordered_map<GroupKey, std::deque<uint64_t>> entries_of_;
  // The number of removed entries, which is the number of the oldest kept entry.
  uint64_t num_pruned_ = 0;
  std::set<Identity> known_;
  std::deque<std::pair<Identity, TimePoint>> known_order_;
};

}  // namespace cadre
