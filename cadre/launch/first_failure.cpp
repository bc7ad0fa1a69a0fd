#include "cadre/launch/first_failure.h"

#include <algorithm>
#include <set>
#include <utility>

#include "cadre/rendezvous/named_culprit.h"
#include "cadre/store/tcp_store.h"

namespace cadre::launch {
namespace {

constexpr Duration kStoreTime = std::chrono::milliseconds(500);

bool is_failure(const WorkerExit& ended) {
  return !ended.status.is_success() && !ended.was_asked_to_stop;
}

}  // namespace

std::optional<Rank> FirstFailure::named_by(Rank rank) {
  const auto found = known_.find(rank.value);
  if (found != known_.end()) return found->second;
  std::optional<Rank> named = named_(rank);
  if (named == rank) named.reset();
  return known_.emplace(rank.value, named).first->second;
}

std::optional<WorkerExit> FirstFailure::find(std::span<const WorkerExit> exits) {
  const auto first = std::ranges::find_if(exits, is_failure);
  if (first == exits.end()) return std::nullopt;
  std::set<int> seen;
  auto at = first;
  while (seen.insert(at->rank.value).second) {
    const std::optional<Rank> named = named_by(at->rank);
    if (!named) return *at;
    const auto next = std::ranges::find_if(
        exits, [&](const WorkerExit& ended) { return ended.rank == *named && is_failure(ended); });
    if (next == exits.end()) return *at;
    at = next;
  }
  return *first;  // they name each other
}

bool FirstFailure::is_known(std::span<const WorkerExit> exits) {
  const std::optional<WorkerExit> failure = find(exits);
  if (!failure) return false;
  if (!window_) window_ = system_.deadline_in(kWindow);
  const std::optional<Rank> named = named_by(failure->rank);
  const bool may_follow = named && std::ranges::none_of(exits, [&](const WorkerExit& ended) {
                            return ended.rank == *named;
                          });
  return !may_follow || window_->has_passed(system_.now());
}

std::optional<Rank> culprit_in_store(os::System& system, const os::Address& store,
                                     const os::Secret& token, Rank rank) {
  const Deadline deadline = system.deadline_in(kStoreTime);
  const auto client = TcpStore::connect(system, {.address = store, .token = token}, deadline);
  if (!client.ok()) return std::nullopt;
  const auto culprit = read_culprit(**client, rank, deadline);
  return culprit.ok() ? *culprit : std::nullopt;
}

}  // namespace cadre::launch
