#include "cadre/core/fabric/plane/plane_state.h"

#include <algorithm>
#include <utility>

#include "cadre/core/os/waiter_listing.h"

namespace cadre {

using wire::Event;

PlaneState::PlaneState(os::System& system, Identity identity, os::Event& wake_up)
    : system_(system),
      rank_(identity.rank),
      wake_up_(wake_up),
      log_(identity.num_ranks, identity.rank) {}

// The plane's thread delivers the events that arrive after the group was registered, and the
// calling thread delivers the earlier ones, so each event is delivered once.
void PlaneState::attach(GroupKey group, std::shared_ptr<GroupEvents> events) {
  const TimePoint now = system_.now();
  std::vector<Event> earlier;
  {
    std::lock_guard lock(mutex_);
    groups_[group] = events;
    earlier = log_.of_group(group, now);
  }
  for (const Event& event : earlier) call({events, event});
}

void PlaneState::detach(GroupKey group) {
  std::shared_ptr<GroupEvents> detached;  // destroyed after the lock is released
  std::lock_guard lock(mutex_);
  const auto found = groups_.find(group);
  if (found == groups_.end()) return;
  detached = std::move(found->second);
  groups_.erase(found);
}

void PlaneState::post(Event event) {
  {
    std::lock_guard lock(mutex_);
    orders_.events.push_back(std::move(event));
  }
  wake_up_.notify();
}

void PlaneState::leave(Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    if (!orders_.leave_by) orders_.leave_by = deadline;
  }
  wake_up_.notify();
}

PlaneState::Orders PlaneState::take_orders() {
  std::lock_guard lock(mutex_);
  Orders orders{{}, orders_.leave_by};
  orders.events.swap(orders_.events);
  return orders;
}

std::vector<StatusAnswer> PlaneState::ask(GroupKey group, std::span<const int> members,
                                          Deadline deadline) {
  Question own;
  const bool is_member = std::ranges::find(members, rank_) != members.end();
  const std::shared_ptr<GroupEvents> own_group = is_member ? this->group(group) : nullptr;
  const auto own_activity = own_group == nullptr ? std::nullopt : own_group->own_activity();
  if (own_activity) own.answers[rank_] = *own_activity;
  uint64_t number = 0;
  {
    std::lock_guard lock(mutex_);
    number = ++num_questions_;
    questions_[number] = std::move(own);
  }
  post(wire::StatusQuestion{rank_, number, group});
  await_answers(number, members, deadline);
  std::vector<StatusAnswer> answers;
  std::lock_guard lock(mutex_);
  const auto& given = questions_[number].answers;
  for (const int rank : members) {
    const auto answer = given.find(rank);
    if (answer != given.end()) {
      answers.push_back({rank, answer->second});
    } else if (log_.has_left(rank)) {
      answers.push_back({.rank = rank, .activity = {}, .has_left = true});
    }
  }
  questions_.erase(number);
  return answers;
}

bool PlaneState::await_answers(uint64_t number, std::span<const int> members, Deadline deadline) {
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  const WaiterListing listing(mutex_, observers_, *waiter);
  while (true) {
    {
      std::lock_guard lock(mutex_);
      if (has_ended_ || is_answered(questions_[number], members)) return true;
    }
    if (deadline.has_passed(system_.now())) return false;
    waiter->park(deadline);
  }
}

bool PlaneState::is_answered(const Question& question, std::span<const int> members) const {
  return std::ranges::all_of(members, [&](int rank) {
    return rank == rank_ || question.answers.contains(rank) || log_.is_lost(rank) ||
           log_.has_left(rank);
  });
}

void PlaneState::take_answer(const wire::StatusAnswer& answer) {
  std::lock_guard lock(mutex_);
  const auto question = questions_.find(answer.number);
  if (question == questions_.end()) return;
  question->second.answers.try_emplace(answer.rank, answer.activity);
  wake_observers();
}

void PlaneState::end() {
  std::lock_guard lock(mutex_);
  has_ended_ = true;
  wake_observers();
}

std::vector<int> PlaneState::lost_ranks() const {
  std::lock_guard lock(mutex_);
  return log_.lost_ranks();
}

std::optional<LossReport> PlaneState::loss_of(int rank) const {
  std::lock_guard lock(mutex_);
  return log_.loss_of(rank);
}

bool PlaneState::has_left(int rank) const {
  std::lock_guard lock(mutex_);
  return log_.has_left(rank);
}

bool PlaneState::is_lost(int rank) const {
  std::lock_guard lock(mutex_);
  return log_.is_lost(rank);
}

std::vector<bool> PlaneState::presence() const {
  std::lock_guard lock(mutex_);
  return log_.presence();
}

std::shared_ptr<GroupEvents> PlaneState::group(GroupKey key) const {
  std::lock_guard lock(mutex_);
  const auto found = groups_.find(key);
  return found == groups_.end() ? nullptr : found->second;
}

std::vector<Event> PlaneState::all_events() {
  const TimePoint now = system_.now();
  std::lock_guard lock(mutex_);
  return log_.all(now);
}

std::vector<Event> PlaneState::events_told_by(int rank) {
  const TimePoint now = system_.now();
  std::lock_guard lock(mutex_);
  return log_.told_by(rank, now);
}

bool PlaneState::learn(const Event& event, int from) {
  const TimePoint now = system_.now();
  std::lock_guard lock(mutex_);
  if (!log_.add(event, from, now)) return false;
  queue_deliveries(event);
  const bool may_answer_a_question = std::holds_alternative<wire::LossReport>(event) ||
                                     std::holds_alternative<wire::FabricLeave>(event);
  if (may_answer_a_question) wake_observers();
  return true;
}

void PlaneState::queue_deliveries(const Event& event) {
  if (std::holds_alternative<wire::LossReport>(event)) {
    for (const auto& [key, group] : groups_) deliveries_.push_back({group, event});
    return;
  }
  const auto* leave = std::get_if<wire::GroupLeave>(&event);
  const auto* failure = std::get_if<wire::GroupFailure>(&event);
  if (leave == nullptr && failure == nullptr) return;
  const auto group = groups_.find(leave != nullptr ? leave->group : failure->group);
  if (group != groups_.end()) deliveries_.push_back({group->second, event});
}

// Delivers the new events to the groups. A report that this rank itself is lost comes last, because
// the error that this rank found at its own end of the same connection is more specific.
void PlaneState::deliver() {
  std::vector<Delivery> deliveries;
  {
    std::lock_guard lock(mutex_);
    deliveries.swap(deliveries_);
  }
  std::stable_partition(deliveries.begin(), deliveries.end(), [this](const Delivery& delivery) {
    const auto* loss = std::get_if<wire::LossReport>(&delivery.event);
    return loss == nullptr || loss->rank != rank_;
  });
  for (const Delivery& delivery : deliveries) call(delivery);
}

void PlaneState::call(const Delivery& delivery) const {
  if (const auto* loss = std::get_if<wire::LossReport>(&delivery.event)) {
    delivery.group->on_rank_lost(*loss);
  }
  const auto* leave = std::get_if<wire::GroupLeave>(&delivery.event);
  if (leave != nullptr && leave->rank != rank_) {
    delivery.group->on_rank_left_group(*leave);
  }
  const auto* failure = std::get_if<wire::GroupFailure>(&delivery.event);
  if (failure != nullptr && failure->origin != rank_) delivery.group->on_group_failed(*failure);
}

void PlaneState::wake_observers() {
  for (os::Waiter* const observer : observers_) observer->unpark();
}

}  // namespace cadre
