// How survivors agree: each leaves a note with the ranks it knows to be lost, waits until all
// others have left theirs or are known to be lost, and proposes who goes on. The first proposal
// that compare_set takes is the decision, for all. A rank that is not in it came too late.
#include <algorithm>
#include <charconv>
#include <set>
#include <utility>
#include <vector>

#include "cadre/base/format.h"
#include "cadre/rendezvous/presence.h"
#include "cadre/rendezvous/rendezvous.h"
#include "cadre/store/prefix_store.h"

namespace cadre {
namespace {

// How long one look at the decision waits before the notes are looked at again.
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

class Agreement {
 public:
  Agreement(os::System& system, const Membership& previous, std::span<const Rank> lost,
            Deadline deadline)
      : system_(system),
        previous_(previous),
        round_(previous.round + 1),
        store_(format("cadre/{}/{}/rejoin", round_, previous.group), previous.store),
        deadline_(deadline),
        lost_(lost.begin(), lost.end()) {
    lost_.erase(previous.rank);
  }

  Result<Membership> run() {
    // The last quarter of the time is kept for the decision itself.
    const TimePoint now = system_.now();
    const Deadline patience(now + deadline_.remaining(now) / 4 * 3);
    CADRE_RETURN_IF_ERROR(store_.set(note_key(previous_.rank), write_ranks(lost_), deadline_));
    while (true) {
      Result<std::set<int>> present = read_notes();
      if (!present.ok()) return present.error();
      const bool all_known = present->size() + lost_.size() >= world_size();
      // compare_set gives the decision if there is one, however late this rank is.
      Result<std::string> decision =
          all_known || patience.has_passed(system_.now())
              ? store_.compare_set(kDecision, "", write_ranks(*present), deadline_)
              : store_.get(kDecision, deadline_.earlier(system_.deadline_in(kLook)));
      if (decision.ok()) return follow(*decision);
      if (decision.error().code() != ErrorCode::kTimeout || deadline_.has_passed(system_.now())) {
        return decision.error();
      }
    }
  }

 private:
  static constexpr std::string_view kDecision = "decision";

  size_t world_size() const { return static_cast<size_t>(previous_.world_size); }
  static std::string note_key(int rank) { return format("note/{}", rank); }

  // The ranks that have left a note and are not lost. A rank that any note lists as lost is lost.
  Result<std::set<int>> read_notes() {
    std::set<int> present;
    for (int rank = 0; rank < previous_.world_size; ++rank) {
      if (!notes_.contains(rank)) {
        const std::vector<std::string> key = {note_key(rank)};
        const Result<bool> is_there = store_.check(key, deadline_);
        if (!is_there.ok()) return is_there.error();
        if (!*is_there) continue;
        const Result<std::string> note = store_.get(key.front(), deadline_);
        if (!note.ok()) return note.error();
        const Result<std::set<int>> lost = read_ranks(*note, previous_.world_size);
        if (!lost.ok()) return lost.error();
        lost_.insert(lost->begin(), lost->end());
        notes_.insert(rank);
      }
      present.insert(rank);
    }
    lost_.erase(previous_.rank);
    for (const int rank : lost_) present.erase(rank);
    return present;
  }

  Result<Membership> follow(const std::string& decision) {
    const Result<std::set<int>> ranks = read_ranks(decision, previous_.world_size);
    if (!ranks.ok()) return ranks.error();
    const auto self = ranks->find(previous_.rank);
    if (self == ranks->end()) {
      return Error(ErrorCode::kAborted,
                   format("rejoin: rank {} came too late, or was taken for lost: round {} goes on "
                          "with the ranks {} of round {}; look at why this rank was late and "
                          "start it anew",
                          previous_.rank, round_, decision, previous_.round));
    }
    Membership next = previous_;
    next.rank = static_cast<int>(std::distance(ranks->begin(), self));
    next.world_size = static_cast<int>(ranks->size());
    next.job_size = next.world_size;
    next.round = round_;
    CADRE_RETURN_IF_ERROR(leave_presence_will(system_, next, deadline_));
    return next;
  }

  os::System& system_;
  const Membership& previous_;
  const uint64_t round_;
  PrefixStore store_;
  const Deadline deadline_;
  std::set<int> lost_;
  std::set<int> notes_;  // whose notes were read
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
  if (previous.world_size > 1) return Agreement(system, previous, lost, deadline).run();
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
