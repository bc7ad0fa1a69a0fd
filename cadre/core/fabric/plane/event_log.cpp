#include "cadre/core/fabric/plane/event_log.h"

namespace cadre {

using wire::Event;

EventLog::EventLog(int num_ranks, int self) : self_(self), ranks_(static_cast<size_t>(num_ranks)) {}

bool EventLog::add(const Event& event, int from, TimePoint now) {
  if (const auto* loss = std::get_if<wire::LossReport>(&event)) return add_loss(*loss, from);
  if (const auto* leave = std::get_if<wire::FabricLeave>(&event)) {
    return add_leave(leave->rank, from);
  }
  if (const auto* leave = std::get_if<wire::GroupLeave>(&event)) {
    return exists(leave->rank) &&
           add_entry(event, {event.index(), leave->group, leave->rank}, from, now);
  }
  if (const auto* failure = std::get_if<wire::GroupFailure>(&event)) {
    return exists(failure->origin) &&
           add_entry(event, {event.index(), failure->group, -1}, from, now);
  }
  return false;
}

bool EventLog::add_loss(const LossReport& loss, int from) {
  if (!exists(loss.rank) || !exists(loss.reporter)) return false;
  RankState& state = ranks_[static_cast<size_t>(loss.rank)];
  // A connection that ends after the rank has left is no loss. But a rank may be killed before its
  // leave event has reached all peers. The peers without the event report its loss and fail their
  // groups, so this rank records the loss, too.
  if (state.loss || (state.has_left && from == kOwn)) return false;
  state.loss = loss;
  state.loss_from = from;
  return true;
}

bool EventLog::add_leave(int rank, int from) {
  if (!exists(rank)) return false;
  RankState& state = ranks_[static_cast<size_t>(rank)];
  if (state.has_left) return false;
  state.has_left = true;
  state.leave_from = from;
  return true;
}

bool EventLog::add_entry(const Event& event, Identity identity, int from, TimePoint now) {
  if (!known_.insert(identity).second) return false;
  known_order_.emplace_back(identity, now);
  entries_of_[std::get<1>(identity)].push_back(num_pruned_ + entries_.size());
  entries_.push_back({event, from, now});
  prune(now);
  return true;
}

void EventLog::prune(TimePoint now) {
  while (!entries_.empty() &&
         (entries_.size() > kMaxEntries || now - entries_.front().at >= kMaxAge)) {
    drop_oldest();
  }
  while (known_order_.size() > 2 * kMaxEntries && now - known_order_.front().second >= kMaxAge) {
    known_.erase(known_order_.front().first);
    known_order_.pop_front();
  }
}

void EventLog::drop_oldest() {
  const Event& event = entries_.front().event;
  const auto* leave = std::get_if<wire::GroupLeave>(&event);
  const GroupKey group =
      leave != nullptr ? leave->group : std::get<wire::GroupFailure>(event).group;
  const auto of_group = entries_of_.find(group);
  of_group->second.pop_front();
  if (of_group->second.empty()) entries_of_.erase(of_group);
  entries_.pop_front();
  ++num_pruned_;
}

std::vector<bool> EventLog::presence() const {
  std::vector<bool> is_present;
  for (const RankState& state : ranks_) is_present.push_back(!state.loss && !state.has_left);
  is_present[static_cast<size_t>(self_)] = true;
  return is_present;
}

std::vector<int> EventLog::lost_ranks() const {
  std::vector<int> lost;
  for (int rank = 0; static_cast<size_t>(rank) < ranks_.size(); ++rank) {
    if (is_lost(rank) && rank != self_) lost.push_back(rank);
  }
  return lost;
}

std::vector<Event> EventLog::events_of_ranks() const {
  std::vector<Event> events;
  for (int rank = 0; static_cast<size_t>(rank) < ranks_.size(); ++rank) {
    if (has_left(rank)) events.emplace_back(wire::FabricLeave{rank});
    if (is_lost(rank)) events.emplace_back(*loss_of(rank));
  }
  return events;
}

std::vector<Event> EventLog::all(TimePoint now) {
  prune(now);
  std::vector<Event> events = events_of_ranks();
  for (const Entry& entry : entries_) events.push_back(entry.event);
  return events;
}

std::vector<Event> EventLog::told_by(int from, TimePoint now) {
  prune(now);
  std::vector<Event> events;
  for (int rank = 0; static_cast<size_t>(rank) < ranks_.size(); ++rank) {
    const RankState& state = ranks_[static_cast<size_t>(rank)];
    if (state.has_left && state.leave_from == from) events.emplace_back(wire::FabricLeave{rank});
    if (state.loss && state.loss_from == from) events.emplace_back(*state.loss);
  }
  for (const Entry& entry : entries_) {
    if (entry.from == from) events.push_back(entry.event);
  }
  return events;
}

// This is called for every new group, so it does not copy the events of other groups.
std::vector<Event> EventLog::of_group(GroupKey group, TimePoint now) {
  prune(now);
  std::vector<Event> events = events_of_ranks();
  std::erase_if(
      events, [](const Event& event) { return !std::holds_alternative<wire::LossReport>(event); });
  const auto of_group = entries_of_.find(group);
  if (of_group == entries_of_.end()) return events;
  for (const uint64_t number : of_group->second) {
    events.push_back(entries_[number - num_pruned_].event);
  }
  return events;
}

}  // namespace cadre
