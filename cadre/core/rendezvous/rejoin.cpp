// How survivors agree on the ranks of the new group. Each survivor writes a note to the store: the
// ranks that it knows to be lost. It waits until every other rank has written its note or is known
// to be lost, and then proposes which ranks continue. The first proposal that compare_set() stores
// is the decision for all ranks. A rank that the decision does not list came too late. The listed
// ranks confirm the decision. If one of them dies before it has confirmed, the others decide again
// in another round.
#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/rendezvous/lost_rank.h"
#include "cadre/core/rendezvous/rendezvous.h"
#include "cadre/core/store/prefix_store.h"

namespace cadre {
namespace {

// A rank waits this long for the decision, and then reads the other ranks' notes again.
constexpr Duration kLook = std::chrono::milliseconds(20);

std::string write_ranks(const std::set<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return text;
}

Result<std::set<int>> read_ranks(const std::string& text, int world_size) {
  std::set<int> ranks;
  for (const char *at = text.data(), *end = at + text.size(); at < end; ++at) {
    int rank = 0;
    const auto [stop, code] = std::from_chars(at, end, rank);
    if (code != std::errc() || rank < 0 || rank >= world_size ||
        (stop < end && (*stop != ',' || stop + 1 == end))) {
      return Error(ErrorCode::kCorruption,
                   format("rejoin: the store holds the list of ranks \"{}\" for a world of {}",
                          text, world_size));
    }
    ranks.insert(rank);
    at = stop;
  }
  return ranks;
}

// Runs one round of the agreement. If the round fails before its group can be connected, run()
// starts the next round.
class Agreement {
 public:
  Agreement(os::System& system, const Membership& previous, std::set<int> lost, Deadline deadline)
      : system_(system),
        previous_(previous),
        round_(previous.round + 1),
        store_(prefix_of(previous), previous.store),
        deadline_(deadline),
        patience_(patience_until(system.now(), deadline)),
        lost_(std::move(lost)) {
    lost_.erase(previous.rank);
  }

  Result<Membership> run() {
    const os::HostInfo host = system_.host();
    // A will: the store publishes this value if this process dies before it leaves its will for the
    // new round. So the other ranks learn of the death.
    const auto will =
        store_.leave_will(kDead, write_lost_rank({previous_.rank, host.pid, host.name}), deadline_);
    if (!will.ok()) return will.error();
    CADRE_RETURN_IF_ERROR(store_.set(kBegun, "yes", deadline_));
    CADRE_RETURN_IF_ERROR(store_.set(note_key(previous_.rank), write_ranks(lost_), deadline_));
    const Result<std::string> decision = decide();
    if (!decision.ok()) return decision.error();
    const Result<std::set<int>> ranks = read_ranks(*decision, previous_.world_size);
    if (!ranks.ok()) return ranks.error();
    Result<Membership> next = follow(*decision, *ranks);
    if (!next.ok() || next->world_size == 1) return next;
    const Result<Outcome> outcome = confirm(*ranks);
    if (!outcome.ok()) return outcome.error();
    if (outcome->is_complete) return next;
    return Agreement(system_, *next, outcome->lost, deadline_).run();
  }

 private:
  static constexpr std::string_view kDecision = "decision";
  static constexpr std::string_view kDead = "dead";
  static constexpr std::string_view kBegun = "begun";

  struct Outcome {
    bool is_complete = false;  // all ranks that the decision lists have confirmed it
    std::set<int> lost = {};  // the ranks that have not confirmed, numbered as in the decided round
  };

  static std::string prefix_of(const Membership& previous) {
    return format("cadre/{}/{}/rejoin", previous.round + 1, previous.group);
  }
  // Returns until when to wait for the other ranks' notes. The last quarter of the time is reserved
  // for the decision itself and for another round.
  static Deadline patience_until(TimePoint now, Deadline deadline) {
    return Deadline(now + deadline.remaining(now) / 4 * 3);
  }
  size_t world_size() const { return static_cast<size_t>(previous_.world_size); }
  static std::string note_key(int rank) { return format("note/{}", rank); }
  static std::string here_key(int rank) { return format("here/{}", rank); }

  Result<std::string> decide() {
    while (true) {
      Result<std::set<int>> present = read_notes();
      if (!present.ok()) return present.error();
      const bool all_known = present->size() + lost_.size() >= world_size();
      // If the store already holds a decision, compare_set() returns it, however late this rank is.
      Result<std::string> decision =
          all_known || patience_.has_passed(system_.now())
              ? store_.compare_set(kDecision, "", write_ranks(*present), deadline_)
              : store_.get(kDecision, deadline_.earlier(system_.deadline_in(kLook)));
      const bool is_late = deadline_.has_passed(system_.now());
      if (decision.ok() || decision.error().code() != ErrorCode::kTimeout || is_late) {
        return decision;
      }
    }
  }

  // Returns the ranks that have written a note and are not lost. A rank that any note lists as lost
  // counts as lost.
  Result<std::set<int>> read_notes() {
    std::set<int> present;
    for (int rank = 0; rank < previous_.world_size; ++rank) {
      if (!notes_.contains(rank)) {
        const Result<std::optional<std::string>> note = read(store_, note_key(rank));
        if (!note.ok()) return note.error();
        if (!*note) continue;
        const Result<std::set<int>> lost = read_ranks(**note, previous_.world_size);
        if (!lost.ok()) return lost.error();
        lost_.insert(lost->begin(), lost->end());
        notes_.insert(rank);
      }
      present.insert(rank);
    }
    const Result<std::set<int>> dead = read_dead();
    if (!dead.ok()) return dead.error();
    lost_.insert(dead->begin(), dead->end());
    lost_.erase(previous_.rank);
    for (const int rank : lost_) present.erase(rank);
    return present;
  }

  // Returns the ranks whose processes have ended, according to the wills of this round and of the
  // previous group. The wills of the previous group are read only if that group left them itself:
  // in the wills of another group the ranks have other numbers.
  Result<std::set<int>> read_dead() {
    std::set<int> dead;
    const auto add = [&](Store& store, std::string_view key) -> Status {
      const Result<std::optional<std::string>> text = read(store, key);
      if (!text.ok()) return text.error();
      for (const LostRank& lost : read_lost_ranks(text->value_or(""))) {
        if (lost.rank >= 0 && lost.rank < previous_.world_size) dead.insert(lost.rank);
      }
      return {};
    };
    CADRE_RETURN_IF_ERROR(add(store_, kDead));
    if (previous_.will_group == previous_.group) {
      CADRE_RETURN_IF_ERROR(add(*previous_.store, lost_key(previous_.round, previous_.group)));
    }
    return dead;
  }

  // Returns the value of the key; nullopt if it is not set.
  Result<std::optional<std::string>> read(Store& store, std::string_view key) {
    const std::string name(key);
    const Result<bool> is_there = store.check(std::span(&name, 1), deadline_);
    if (!is_there.ok()) return is_there.error();
    if (!*is_there) return std::optional<std::string>();
    Result<std::string> value = store.get(name, deadline_);
    if (!value.ok()) return value.error();
    return std::optional(std::move(value).value());
  }

  Result<Membership> follow(const std::string& decision, const std::set<int>& ranks) {
    const auto self = ranks.find(previous_.rank);
    if (self == ranks.end()) {
      return Error(ErrorCode::kAborted,
                   format("rejoin: rank {} came too late, or was taken for lost: round {} goes on "
                          "with the ranks {} of round {}; look at why this rank was late and "
                          "start it anew",
                          previous_.rank, round_, decision, previous_.round));
    }
    Membership next = previous_;
    next.rank = static_cast<int>(std::distance(ranks.begin(), self));
    next.world_size = static_cast<int>(ranks.size());
    next.forget_numbers_of_job();
    next.job_size = next.world_size;
    next.round = round_;
    CADRE_RETURN_IF_ERROR(leave_presence_will(system_, next, deadline_));
    return next;
  }

  // A rank that the decision lists may have died after it wrote its note. So each listed rank sets
  // a second key. It does so after it has left a will for the new round: from then on the store
  // reports its death. If a rank does not set this key, the others give up the decided group before
  // they connect it, and begin the next round. A rank that finds the next round begun takes part in
  // it.
  Result<Outcome> confirm(const std::set<int>& ranks) {
    CADRE_RETURN_IF_ERROR(store_.set(here_key(previous_.rank), "yes", deadline_));
    std::vector<std::string> keys;
    for (const int rank : ranks) keys.push_back(here_key(rank));
    Membership next = previous_;
    next.round = round_;
    PrefixStore next_store(prefix_of(next), previous_.store);
    const TimePoint now = system_.now();
    const Deadline patience(now + deadline_.remaining(now) / 2);
    while (true) {
      const Status all = store_.wait(keys, deadline_.earlier(system_.deadline_in(kLook)));
      if (!all.ok() && all.error().code() != ErrorCode::kTimeout) return all.error();
      const auto next_begun = read(next_store, kBegun);
      if (!next_begun.ok()) return next_begun.error();
      if (*next_begun) return Outcome{};
      if (all.ok()) return Outcome{.is_complete = true};
      Result<std::set<int>> lost = missing_of(ranks, patience.has_passed(system_.now()));
      if (!lost.ok()) return lost.error();
      if (!lost->empty()) return Outcome{.lost = *std::move(lost)};
      if (deadline_.has_passed(system_.now())) return all.error();
    }
  }

  // Returns the ranks that the decision lists, that have not confirmed and are dead, numbered as in
  // the decided round. If `is_late`, every rank that has not confirmed counts as missing.
  Result<std::set<int>> missing_of(const std::set<int>& ranks, bool is_late) {
    const Result<std::set<int>> dead = read_dead();
    if (!dead.ok()) return dead.error();
    std::set<int> missing;
    int number = 0;
    for (const int rank : ranks) {
      if (is_late || dead->contains(rank)) {
        const Result<std::optional<std::string>> here = read(store_, here_key(rank));
        if (!here.ok()) return here.error();
        if (!*here) missing.insert(number);
      }
      ++number;
    }
    return missing;
  }

  os::System& system_;
  const Membership& previous_;
  const uint64_t round_;
  PrefixStore store_;
  const Deadline deadline_;
  // The time at which to stop waiting for ranks that are not known to be lost.
  const Deadline patience_;
  std::set<int> lost_;
  std::set<int> notes_;  // the ranks whose notes were read
};

}  // namespace

Result<Membership> rejoin(os::System& system, const Membership& previous,
                          std::span<const Rank> lost, Deadline deadline) {
  if (previous.world_size > 1 && previous.store == nullptr) {
    return Error(ErrorCode::kInvalidArgument,
                 format("rejoin: a membership of {} ranks needs a store", previous.world_size));
  }
  for (const Rank rank : lost) {
    if (rank >= 0 && rank < previous.world_size) continue;
    return Error(ErrorCode::kInvalidArgument,
                 format("rejoin: rank {} of the lost ranks is not in the world of {} ranks", rank,
                        previous.world_size));
  }
  if (previous.world_size > 1) {
    auto next =
        Agreement(system, previous, std::set<int>(lost.begin(), lost.end()), deadline).run();
    if (next.ok() || next.error().code() != ErrorCode::kPeerLost) return next;
    return next.error().with_context(
        "rejoin: the ranks meet at the job's store, which has ended with its process (the "
        "launcher, or rank 0 where none was used); start the job anew from its last snapshot");
  }
  Membership next = previous;
  ++next.round;
  return next;
}

Membership join_within(os::System& system, Rendezvous& rendezvous, Duration timeout) {
  return rendezvous.join(system.deadline_in(timeout)).value_or_throw();
}

Membership rejoin_within(os::System& system, const Membership& previous, std::span<const Rank> lost,
                         Duration timeout) {
  return rejoin(system, previous, lost, system.deadline_in(timeout)).value_or_throw();
}

}  // namespace cadre
