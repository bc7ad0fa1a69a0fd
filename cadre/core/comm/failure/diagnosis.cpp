#include "cadre/core/comm/failure/diagnosis.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

using wire::Activity;
using wire::ActivityState;

// Returns whether the rank runs collective `number`, or has failed in it.
bool is_in(const Activity& activity, uint64_t number) {
  return is_in_operation(activity) && !is_message(activity.fingerprint) &&
         activity.number == number;
}

// Returns whether the rank has completed collective `number`.
bool has_passed(const Activity& activity, uint64_t number) {
  if (is_message(activity.fingerprint)) return false;
  const bool is_done = activity.number == number && activity.state == ActivityState::kDone;
  return activity.number > number || is_done;
}

// Returns whether the rank reports that it waits for another one.
bool is_waiting(const Activity& activity) {
  return is_in_operation(activity) && activity.waiting_for >= 0;
}

// Returns whether the rank answers and runs no operation of any group. A rank that runs an
// operation of another group may wait there for a rank that `view` does not show.
bool is_idle(const PeerView& view) {
  return view.answers && !is_in_operation(view.activity) && view.elsewhere.empty();
}

constexpr std::string_view kSameOrder = "let all ranks call the same operations in the same order";
constexpr std::string_view kRestart = "restart the job or call rejoin()";

std::string_view remedy_of(const Failure& failure) {
  if (!failure.remedy.empty()) return failure.remedy;
  switch (failure.code) {
    case ErrorCode::kTimeout:
      if (failure.operation && is_message(failure.operation->fingerprint)) {
        const OpKind kind = OpDescriptor::from_fingerprint(failure.operation->fingerprint).kind;
        if (kind == OpKind::kWaitSignal) {
          return "check that the other rank signals this slot of the same buffer as often as it is "
                 "waited for; then restart the job or call rejoin()";
        }
        return "check that the other rank calls the matching send or recv, with the same tag; then "
               "restart the job or call rejoin()";
      }
      return "check that every rank calls this operation; then restart the job or call rejoin()";
    case ErrorCode::kPeerLost:
      return kRestart;
    case ErrorCode::kInvalidArgument:
      return kSameOrder;
    case ErrorCode::kAborted:
      if (failure.reporter < 0 && !failure.is_linked) return kRestart;
      return "look at the first failure, then restart the job or call rejoin()";
    case ErrorCode::kUnavailable:
      return "remove this cause, then restart the job or call rejoin()";
    case ErrorCode::kCorruption:
      return "check that all ranks run the same build, then restart the job or call rejoin()";
    case ErrorCode::kInternal:
      break;
  }
  return "report this error, which is a defect of Cadre";
}

std::string_view verb_of(ErrorCode code) {
  if (code == ErrorCode::kTimeout) return "timed out";
  if (code == ErrorCode::kAborted) return "was aborted";
  return "failed";
}

// Returns "a", "a and b" or "a, b and c".
std::string list_of(const std::vector<std::string_view>& items) {
  std::string text;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) text += i + 1 == items.size() ? " and " : ", ";
    text += items[i];
  }
  return text;
}

// Returns the kind of collective in which all parts have equal sizes, for a kind whose parts may
// have any sizes.
OpKind even_kind_of(OpKind kind) {
  if (kind == OpKind::kAllGatherV) return OpKind::kAllGather;
  if (kind == OpKind::kReduceScatterV) return OpKind::kReduceScatter;
  return kind == OpKind::kAllToAllV ? OpKind::kAllToAll : kind;
}

// Returns text such as "rank 1 (node0, pid 812) called barrier() as #3".
std::string describe_call(const Roster& roster, const Call& call) {
  return format("{} called {} as #{}", roster.describe(call.rank),
                OpDescriptor::from_fingerprint(call.fingerprint).to_string(), call.number);
}

// Returns ", waiting for rank 1 (node0, pid 812)" for an aborted operation that waits for a rank
// other than the culprit. Ranks of several groups may wait for each other in a chain. Each message
// names the rank for which its own rank waits, so the messages of all ranks together lead to the
// end of the chain.
std::string describe_awaited(const Roster& roster, const Failure& failure, const Activity& own) {
  const int rank = own.waiting_for;
  const bool is_news = failure.code == ErrorCode::kAborted && is_waiting(own) &&
                       rank != failure.culprit && rank < roster.world_size();
  return is_news ? ", waiting for " + roster.describe(rank) : "";
}

std::string first_line(const Roster& roster, const Failure& failure, const Activity& last_own) {
  const std::string where = roster.describe(roster.self);
  if (failure.operation) {
    const Activity& op = *failure.operation;
    return format("{} on group \"{}\" {} after {} on {}{}",
                  describe_operation(op.number, op.fingerprint), roster.group,
                  verb_of(failure.code), describe_duration(Duration(op.age_ns)), where,
                  describe_awaited(roster, failure, op));
  }
  std::string when = "before its first operation";
  if (last_own.state != ActivityState::kNothingYet) {
    when = format("{} {}", last_own.state == ActivityState::kRunning ? "during" : "after",
                  describe_operation(last_own.number, last_own.fingerprint));
  }
  return format("group \"{}\" {} on {} {}{}", roster.group, verb_of(failure.code), where, when,
                describe_awaited(roster, failure, last_own));
}

}  // namespace

std::string first_failure_cause(const std::string& cause, const std::string& sentence) {
  std::string text =
      cause.starts_with(kFirstFailure) ? cause : std::string(kFirstFailure) + sentence;
  if (text.ends_with('.')) text.pop_back();  // the cause becomes part of a sentence
  return text;
}

Failure failure_from_notice(const wire::AbortNotice& notice, bool is_loss,
                            const NoticeRanks& ranks) {
  if (is_loss || notice.code == ErrorCode::kInvalidArgument) {
    return {.code = notice.code,
            .culprit = ranks.culprit,
            .cause = notice.cause,
            .reporter = ranks.reporter,
            .remedy = notice.remedy};
  }
  return {ErrorCode::kAborted,
          ranks.culprit,
          first_failure_cause(notice.cause, notice.message),
          {},
          ranks.reporter};
}

Failure closed_here(const Roster& roster) {
  return {.code = ErrorCode::kInvalidArgument,
          .culprit = roster.self.value,
          .cause = format("{} has no connections any more: other code of its process has closed "
                          "file descriptors of Cadre",
                          roster.describe(roster.self)),
          .reporter = roster.self.value,
          .remedy = std::string(kCloseOnlyOwn)};
}

bool is_message(const Fingerprint& fingerprint) {
  const OpKind kind = OpDescriptor::from_fingerprint(fingerprint).kind;
  return kind == OpKind::kSend || kind == OpKind::kRecv || kind == OpKind::kWaitSignal;
}

std::string Roster::describe(int rank) const {
  const int of_job = world_rank(rank);
  if (of_job < 0) return format("rank {}", rank);
  const wire::RankAddress& address = rank_address(rank);
  if (has_ranks_of_job()) return format("rank {} ({}, pid {})", rank, address.host, address.pid);
  return format("rank {} of group \"{}\" (world rank {}, {}, pid {})", rank, group, of_job,
                address.host, address.pid);
}

bool Roster::has_ranks_of_job() const {
  if (world_size() != layout->num_ranks()) return false;
  return world_rank(0) == 0 && std::ranges::is_sorted(members);
}

int Roster::world_rank(int rank) const {
  return rank < 0 || rank >= world_size() ? -1 : members[static_cast<size_t>(rank)];
}

std::string describe_duration(Duration duration) {
  const double seconds = static_cast<double>(std::max<int64_t>(duration.count(), 0)) * 1e-9;
  if (seconds < 1) return format("{:.0f} ms", seconds * 1e3);
  return format(seconds < 10 ? "{:.1f} s" : "{:.0f} s", seconds);
}

std::string describe_last_seen(const Activity& activity) {
  if (activity.state == ActivityState::kNothingYet) return "not seen in any operation yet";
  const std::string operation = describe_operation(activity.number, activity.fingerprint);
  const std::string age = describe_duration(Duration(activity.age_ns));
  if (activity.state == ActivityState::kDone) {
    return format("last seen after {}, {} ago", operation, age);
  }
  const std::string phase = activity.phase.empty() ? "" : ", " + activity.phase;
  return format("last seen in {}{}, {} ago", operation, phase, age);
}

std::string describe_peer(const PeerView& view) {
  if (!view.left_after) return describe_last_seen(view.activity);
  if (*view.left_after == 0) return "left the group before its first collective";
  return format("left the group after #{}", *view.left_after);
}

std::string gone_cause(const Roster& roster, int peer, const PeerView& view, SignOfLoss sign) {
  std::string_view why = "its connection ended";
  if (sign == SignOfLoss::kProcessEnded) why = "its process ended";
  if (sign == SignOfLoss::kUnreachable) why = "it cannot be reached any more";
  if (sign == SignOfLoss::kSilence) why = "it sends nothing although its connection is open";
  if (sign == SignOfLoss::kNamedByLauncher) why = "the launcher has lost its host";
  return format("{} is gone: {}, {}", roster.describe(peer), why,
                describe_last_seen(view.activity));
}

int first_left(std::span<const PeerView> views) {
  const auto found =
      std::ranges::find_if(views, [](const PeerView& view) { return view.left_after.has_value(); });
  return found == views.end() ? -1 : static_cast<int>(found - views.begin());
}

std::string all_left_cause(const Roster& roster, std::span<const PeerView> views,
                           const Error& error) {
  const int peer = first_left(views);
  if (peer < 0) return error.message();
  const uint64_t left_after = *views[static_cast<size_t>(peer)].left_after;
  return format("no other rank can send any more: {}", left_cause(roster, peer, left_after));
}

std::string left_cause(const Roster& roster, int peer, uint64_t left_after) {
  PeerView view;
  view.left_after = left_after;
  return format("{} {} (it ended its loop early?)", roster.describe(peer), describe_peer(view));
}

std::string timeout_cause(const Roster& roster, int culprit, const PeerView& view) {
  if (culprit < 0) return "no rank is known to be late";
  const std::string silent = view.is_cut_off    ? ", whose host takes no connection"
                             : view.is_silent() ? ", which does not answer"
                                                : "";
  const std::string elsewhere = view.elsewhere.empty() ? "" : ", now in " + view.elsewhere;
  return format("waiting for {}{}: {}{}", roster.describe(culprit), silent, describe_peer(view),
                elsewhere);
}

Mismatch first_mismatch(std::span<const PeerView> views, const Mismatch& found) {
  const uint64_t number = found.one.number;
  std::vector<Call> calls;
  for (int rank = 0; rank < static_cast<int>(views.size()); ++rank) {
    const Activity& activity = views[static_cast<size_t>(rank)].activity;
    if (rank == found.one.rank) {
      calls.push_back(found.one);
    } else if (rank == found.other.rank && found.other.number == number) {
      calls.push_back(found.other);
    } else if (is_in(activity, number)) {
      calls.push_back({rank, activity.number, activity.fingerprint});
    }
  }
  for (const Call& call : calls) {
    if (call.fingerprint != calls.front().fingerprint) return {calls.front(), call};
  }
  return found;
}

bool may_have_lower_pair(std::span<const PeerView> views, const Mismatch& mismatch) {
  const auto num_below = static_cast<size_t>(std::min(mismatch.one.rank, mismatch.other.rank));
  return std::ranges::any_of(views.first(num_below), [&](const PeerView& view) {
    return has_passed(view.activity, mismatch.one.number);
  });
}

int culprit_of(const Mismatch& mismatch) {
  return std::max(mismatch.one.rank, mismatch.other.rank);
}

// Returns whether the ranks made no different calls, but use different engines: only some engines
// begin with an operation 0, which no program calls.
bool is_between_engines(const Mismatch& mismatch) {
  const Call& one = mismatch.one;
  const Call& other = mismatch.other;
  const bool is_equal = one.number == other.number && one.fingerprint == other.fingerprint;
  return one.number == 0 || other.number == 0 || is_equal;
}

std::string mismatch_cause(const Roster& roster, const Mismatch& mismatch) {
  Call first = mismatch.one;
  Call second = mismatch.other;
  if (first.rank > second.rank) std::swap(first, second);
  if (is_between_engines(mismatch)) {
    return format("the ranks disagree: {} and {} use different engines (transports) for this group",
                  roster.describe(first.rank), roster.describe(second.rank));
  }
  return format("the ranks disagree: {}, {}", describe_call(roster, first),
                describe_call(roster, second));
}

std::string mismatch_remedy(const Mismatch& mismatch) {
  if (is_between_engines(mismatch)) {
    return "pass the same transport (CommunicatorOptions::transport, InitOptions::backend) on all "
           "ranks";
  }
  const auto one = OpDescriptor::from_fingerprint(mismatch.one.fingerprint);
  const auto other = OpDescriptor::from_fingerprint(mismatch.other.fingerprint);
  const OpKind kind = even_kind_of(one.kind);
  if (mismatch.one.number != mismatch.other.number || kind != even_kind_of(other.kind)) {
    return std::string(kSameOrder);
  }
  if (one.kind != other.kind && kind == OpKind::kAllToAll) {
    return "pass split sizes on all ranks or on none";
  }
  std::vector<std::string_view> same;
  const bool has_one_dtype = one.dtype == other.dtype;
  const bool has_one_shape =
      one.count == other.count && one.shape.bits() == other.shape.bits() && one.kind == other.kind;
  if (kind == OpKind::kAllocate) {
    if (!has_one_shape) same.push_back("the same number of bytes");
  } else if (one.kind != kind || other.kind != kind) {
    if (!has_one_shape) same.push_back("the same sizes of parts");
    if (!has_one_dtype) same.push_back("tensors of one dtype");
  } else if (!has_one_shape) {
    same.push_back(has_one_dtype ? "tensors of one shape" : "tensors of one shape and dtype");
  } else if (!has_one_dtype) {
    same.push_back("tensors of one dtype");
  }
  if (one.reduce_op != other.reduce_op) same.push_back("the same reduction");
  if (one.root != other.root) same.push_back("the same root");
  if (one.num_coalesced != other.num_coalesced) same.push_back("lists of one length");
  if (same.empty()) return std::string(kSameOrder);
  return format("pass {} on all ranks, unless a rank has left out an earlier call", list_of(same));
}

bool is_ring_of_sends(std::span<const PeerView> views, Rank self, int waiting_for) {
  int at = waiting_for;
  for (size_t i = 0; i < views.size() && at != self; ++i) {
    if (at < 0 || at >= static_cast<int>(views.size())) return false;
    const Activity& activity = views[static_cast<size_t>(at)].activity;
    const OpKind kind = OpDescriptor::from_fingerprint(activity.fingerprint).kind;
    if (!is_in_operation(activity) || kind != OpKind::kSend) return false;
    at = activity.waiting_for;
  }
  return at == self;
}

std::string part_mismatch_cause(const Roster& roster, const OpProgress::PartMismatch& mismatch,
                                DType dtype) {
  return format("the ranks disagree: {} sends {} x {} to {}, which expects {}",
                roster.describe(mismatch.sender), dtype, mismatch.sent_bytes / size_of(dtype),
                roster.describe(mismatch.receiver), mismatch.expected_bytes / size_of(dtype));
}

// A chain of waits that ends at a silent rank, or at an idle rank that has not passed the operation
// in which it is awaited, is a sufficient explanation of the timeout. Otherwise a silent rank
// outside the chain is the best candidate, since a rank of the chain may wait for it in another
// group. A silent rank outside the chain is only the second choice, because a rank that was not
// scheduled within the time for answers is silent as well.
//
// If a rank waits for one that has already passed the operation, the data between the two was lost.
// If another rank waits for this one in an earlier operation, or if the two wait for each other,
// the data that this rank sent was lost. In a longer cycle of waits any of its streams may be the
// broken one.
Suspect find_culprit(std::span<const PeerView> views, Rank self, std::optional<uint64_t> number,
                     int waiting_for) {
  const int world_size = static_cast<int>(views.size());
  const auto is_peer = [&](int rank) { return rank >= 0 && rank < world_size && rank != self; };
  const auto view = [&](int rank) -> const PeerView& { return views[static_cast<size_t>(rank)]; };
  const auto is_elsewhere = [&](int rank) {
    return !view(rank).has_ended() && (!number || !is_in(view(rank).activity, *number));
  };
  const auto suspect = [&](int rank) {
    return Suspect{rank, is_peer(rank) && !is_waiting(view(rank).activity)};
  };
  std::vector<bool> is_seen(views.size());
  int first_elsewhere = -1;
  int ended = -1;
  int previous = self.value;
  int at = waiting_for;
  std::optional<uint64_t> waits_in = number;  // the collective in which `previous` waits
  while (is_peer(at) && !is_seen[static_cast<size_t>(at)]) {
    const Activity& activity = view(at).activity;
    if (view(at).is_silent()) return {at, true};
    is_seen[static_cast<size_t>(at)] = true;
    if (first_elsewhere < 0 && is_elsewhere(at)) first_elsewhere = at;
    if (view(at).has_ended()) ended = at;
    const bool is_over = ended >= 0 || (waits_in && has_passed(activity, *waits_in));
    // A view shows only one operation. If that is a message, it is not known which collectives the
    // rank has passed.
    const bool hides_collectives =
        waits_in && activity.state == ActivityState::kDone && is_message(activity.fingerprint);
    if (!is_over && !hides_collectives && is_idle(view(at))) return {at, true};
    if (is_over && ended < 0) first_elsewhere = at;
    previous = at;
    waits_in =
        number && !is_message(activity.fingerprint) ? std::optional(activity.number) : std::nullopt;
    at = is_over || !is_waiting(activity) ? -1 : activity.waiting_for;
  }
  for (int rank = 0; rank < world_size; ++rank) {
    if (is_peer(rank) && view(rank).is_silent()) return {rank, true};
  }
  const bool is_awaited_behind = waits_in && *waits_in < number.value_or(0);
  // A peer that waits for this rank in a send or recv does not take part in this rank's collective:
  // data between the two may be lost.
  const bool is_awaited_in_message =
      is_peer(previous) && is_message(view(previous).activity.fingerprint);
  const bool is_awaited = is_awaited_behind || is_awaited_in_message;
  if (at == self && (previous == waiting_for || is_awaited)) return {previous, false};
  if (is_peer(at)) return {at, false};
  if (ended >= 0) return {ended, false};  // rank `ended` reported the cause, or its data was lost
  if (first_elsewhere >= 0) return suspect(first_elsewhere);
  for (int rank = 0; rank < world_size; ++rank) {
    const bool is_late =
        number && is_peer(rank) && is_elsewhere(rank) && !has_passed(view(rank).activity, *number);
    if (is_late) return suspect(rank);
  }
  return {waiting_for, false};
}

Duration lag_of_chain(std::span<const PeerView> views, Rank self, int waiting_for, Duration limit) {
  const auto age = [&](int rank) {
    return Duration(views[static_cast<size_t>(rank)].activity.age_ns);
  };
  Duration lag{0};
  int at = waiting_for;
  for (size_t i = 0; i < views.size(); ++i) {
    if (at < 0 || at >= static_cast<int>(views.size()) || at == self) break;
    const Activity& activity = views[static_cast<size_t>(at)].activity;
    if (!is_waiting(activity)) break;
    lag = std::max(lag, age(self.value) - age(at));
    at = activity.waiting_for;
  }
  return std::min(lag, limit);
}

std::string compose_sentence(const Roster& roster, const Failure& failure,
                             const Activity& last_own) {
  return format("{}\n  {}", first_line(roster, failure, last_own), failure.cause);
}

Error compose_error(const Roster& roster, const Failure& failure, const Activity& last_own,
                    const std::string& record_path) {
  const std::string record = record_path.empty() ? "" : format(" Record: {}", record_path);
  ErrorDetails details;
  details.group = roster.group;
  if (failure.culprit >= 0) details.culprit = failure.culprit;
  const int of_job =
      failure.culprit >= 0 ? roster.world_rank(failure.culprit) : failure.outside_culprit;
  if (of_job >= 0) details.culprit_world_rank = of_job;
  if (failure.reporter >= 0) {
    details.reporter = Rank(failure.reporter);
  } else if (!failure.is_linked) {
    details.reporter = roster.self;
  }
  if (failure.operation) {
    const Activity& op = *failure.operation;
    details.operation = to_string(OpDescriptor::from_fingerprint(op.fingerprint).kind);
    details.operation_number = op.number;
  }
  return Error(failure.code,
               format("{}. Remedy: {}.{}", compose_sentence(roster, failure, last_own),
                      remedy_of(failure), record))
      .with_details(std::move(details));
}

Error end_mismatch_error(const Roster& roster, const Mismatch& mismatch,
                         const std::string& record_path) {
  const Call& own = mismatch.one;
  const bool is_own_shorter = own.number < mismatch.other.number;
  const Call& shorter = is_own_shorter ? own : mismatch.other;
  const Call& longer = is_own_shorter ? mismatch.other : own;
  const std::string cause =
      shorter.number == longer.number
          ? mismatch_cause(roster, mismatch)
          : format("the ranks disagree: {}, but {}",
                   left_cause(roster, shorter.rank, shorter.number), describe_call(roster, longer));
  Activity last;
  last.state = own.number == 0 ? ActivityState::kNothingYet : ActivityState::kDone;
  last.number = own.number;
  last.fingerprint = own.fingerprint;
  const Failure failure{.code = ErrorCode::kInvalidArgument,
                        .culprit = culprit_of(mismatch),
                        .cause = cause,
                        .remedy = mismatch_remedy(mismatch)};
  return compose_error(roster, failure, last, record_path);
}

}  // namespace cadre
