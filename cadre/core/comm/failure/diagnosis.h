// Finds the rank that caused a failure and composes the message: what happened to which operation,
// which rank is at fault, what that rank was last seen doing, and the remedy.
//
// Threads: pure functions over values. Blocking: never. Errors: none.
// Golden texts: diagnosis_test.cpp and tests/process.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/fabric/bootstrap/layout.h"
#include "cadre/core/fabric/plane/group_events.h"
#include "cadre/core/wire/control.h"

namespace cadre {

// The members of a group: their addresses in the job, and how messages name them.
struct Roster {
  std::string group;
  Rank self;
  std::shared_ptr<const Layout> layout;  // shared with the fabric and its other groups
  std::vector<int> members;  // members[r] is the rank in the layout of the group's rank r

  int world_size() const { return static_cast<int>(members.size()); }
  const wire::RankAddress& rank_address(int rank) const {
    return layout->rank_address(members[static_cast<size_t>(rank)]);
  }
  // Returns "rank 3 (node1, pid 812)". In a group of some of the job's ranks, or with them in
  // another order, returns "rank 1 of group "tp" (world rank 3, node1, pid 812)".
  std::string describe(int rank) const;
  // Returns whether each rank has the same number in the group and in the job.
  bool has_ranks_of_job() const;
  // Returns the rank in the job of a rank of this group; -1 for a rank that is no member.
  int world_rank(int rank) const;
};

// The current knowledge of this rank about a peer.
struct PeerView {
  wire::Activity activity;  // what the peer does now, as far as this rank knows
  bool is_gone = false;     // the peer was lost without having left the group
  bool answers = false;     // the peer replied to the last status question
  // The peer published a failure of the group, or left the job although it is still a member of the
  // group.
  bool has_aborted = false;
  // The number of collectives that the peer had called when it left in good order; nullopt if it
  // has not left.
  std::optional<uint64_t> left_after;
  bool is_cut_off = false;  // no connection to its host can be opened from this rank
  // The operation that the peer runs in another group, from its reply to the last status question;
  // empty if it runs none.
  std::string elsewhere = {};

  // Returns whether the peer has left the group, in good order or after a failure.
  bool has_ended() const { return has_aborted || left_after; }
  // Returns whether the peer has not ended and did not reply to the last status question.
  bool is_silent() const { return !answers && !has_ended(); }
};

// A failure of the group on one rank, before it becomes an Error.
struct Failure {
  ErrorCode code = ErrorCode::kInternal;
  int culprit = -1;  // the rank at fault, or -1
  std::string cause;
  // The operation that failed here; nullopt if none was running.
  std::optional<wire::Activity> operation;
  int reporter = -1;  // the rank that found the first failure; -1 if this failure is the first
  // Whether to log the failure. False if an exception reports the cause to the program anyway, or
  // if the failure from which this one follows is already logged.
  bool is_logged = true;
  // This failure follows from the failure of another group of this process. The members of this
  // group may not have received the report of that failure, so this rank publishes this failure to
  // them, whichever rank detected it.
  bool is_linked = false;
  // The rank in the fabric of a culprit that is no member of this group; -1 if there is none.
  // Groups that are linked with this group may have that rank as a member.
  int outside_culprit = -1;
  // The control plane has reported the loss of the culprit, which may be outside this group.
  bool is_loss = false;
  // The remedy if the cause has one of its own; if empty, the remedy of the error code is used.
  std::string remedy = {};
};

// The remedy if a descriptor was closed from outside (os/io/fd.h).
inline constexpr std::string_view kCloseOnlyOwn =
    "let the program close only descriptors that it has opened itself, and start the job anew";

// Returns the failure of this rank if its connections were closed from outside.
Failure closed_here(const Roster& roster);

// The prefix of a cause that refers to the failure of another rank or group.
inline constexpr std::string_view kFirstFailure = "first failure: ";

// Returns the cause of a failure that follows from another failure, which `sentence` describes and
// whose cause is `cause`. If `cause` itself refers to an earlier failure, it already has the prefix
// and is returned.
std::string first_failure_cause(const std::string& cause, const std::string& sentence);

// The culprit and the reporter of an AbortNotice as ranks of the group.
struct NoticeRanks {
  int culprit = -1;  // the rank at fault, as in Failure
  int reporter = -1;
};
// Returns the failure of this rank after another rank has reported one. The loss of a rank and a
// mismatch of operations are raised with the same code and cause on all ranks. Any other failure is
// raised as kAborted, with a cause that refers to the failure of the reporting rank.
Failure failure_from_notice(const wire::AbortNotice& notice, bool is_loss,
                            const NoticeRanks& ranks);

// Returns whether the fingerprint is that of a send, a recv or a wait for a signal, which are
// numbered apart from collectives.
bool is_message(const Fingerprint& fingerprint);
// Returns text such as "60 s", "1.5 s" or "250 ms".
std::string describe_duration(Duration duration);
// Returns "last seen in all_gather #1041, reduce, 61 s ago" or "last seen after all_gather #1041,
// 61 s ago".
std::string describe_last_seen(const wire::Activity& activity);
// Returns describe_last_seen(), or "left the group after #1047" for a peer that has left in good
// order.
std::string describe_peer(const PeerView& view);

std::string gone_cause(const Roster& roster, int peer, const PeerView& view,
                       SignOfLoss sign = SignOfLoss::kConnectionEnded);
// Returns the lowest rank that has left, or -1.
int first_left(std::span<const PeerView> views);
// Returns why a receive from any rank cannot end: all streams have ended. `error` is the error of
// one stream.
std::string all_left_cause(const Roster& roster, std::span<const PeerView> views,
                           const Error& error);
std::string left_cause(const Roster& roster, int peer, uint64_t left_after);
std::string timeout_cause(const Roster& roster, int culprit, const PeerView& view);
// A call of one rank.
struct Call {
  int rank = -1;
  uint64_t number = 0;
  Fingerprint fingerprint = {};
};
// Two ranks whose calls with the same number differ.
struct Mismatch {
  Call one;
  Call other;
};
// Returns the lowest pair of ranks whose calls differ: the lowest rank that runs the operation of
// `found.one`, and the lowest other rank in that operation that called something else. Both ranks
// are taken from the views; if the views show no such pair, returns `found`. Ranks with equal views
// return the same pair, whichever of them found the mismatch. views[r] is the view of rank r.
Mismatch first_mismatch(std::span<const PeerView> views, const Mismatch& found);
// Returns whether a rank below both ranks of the pair has completed the operation. The view of that
// lower rank no longer shows its call in the operation. But a rank that received a message of the
// operation from it knows the call, and reports a lower pair.
bool may_have_lower_pair(std::span<const PeerView> views, const Mismatch& mismatch);
// Returns the higher rank of the pair, which counts as the rank at fault. So all ranks that report
// the pair name the same rank, even if it is this one.
int culprit_of(const Mismatch& mismatch);
// Returns the cause with both calls. All ranks return the same text.
std::string mismatch_cause(const Roster& roster, const Mismatch& mismatch);
// Returns the remedy, which depends on what differs between the two calls; the same on all ranks.
std::string mismatch_remedy(const Mismatch& mismatch);
// Returns the error for two ranks that left the group after different collectives, or after
// different numbers of them. `mismatch.one` is the last call of this rank.
Error end_mismatch_error(const Roster& roster, const Mismatch& mismatch,
                         const std::string& record_path);
// Returns the cause with the two sizes. All ranks return the same text.
std::string part_mismatch_cause(const Roster& roster, const OpProgress::PartMismatch& mismatch,
                                DType dtype);
// The remedies of failures that are found in other files.
inline constexpr std::string_view kEqualParts =
    "let each rank expect from every other rank what that rank sends to it: output split sizes "
    "are compared with the input split sizes of the senders";
inline constexpr std::string_view kMatchingMessages =
    "let each send have one recv with its tag, number of elements and dtype";
inline constexpr std::string_view kNoRingOfSends =
    "use send_async or batch_send_recv, because each of these ranks waits in a send for the recv "
    "of the next; then restart the job or call rejoin()";

// The rank that keeps an operation from completing.
struct Suspect {
  int rank = -1;
  // True if the rank does not answer, or waits for no other rank. If false, another rank may have
  // better evidence, for example because it cannot reach the rank for which it waits.
  bool is_certain = false;
};

// Returns the rank that caused a wait. Follows the chain of waits from `waiting_for` up to a rank
// that is silent, that waits for no other rank, or that has passed collective `number` (nullopt for
// a message). Returns the first of these ranks that exists:
// 1. the rank at the end of this chain if it is silent, or if it answers, runs no operation of any
//    group and has not passed the operation in which a rank waits for it;
// 2. a silent rank outside the chain;
// 3. another rank of the chain: one in a cycle of waits, one that has left or failed, or one that
//    runs another operation;
// 4. a rank outside the chain that has not reached collective `number`.
// views[r] is the view of rank r.
Suspect find_culprit(std::span<const PeerView> views, Rank self, std::optional<uint64_t> number,
                     int waiting_for);

// Returns whether each rank of the chain of waits from `waiting_for` is in a send to the next one,
// up to `self`. views[r] is the view of rank r.
bool is_ring_of_sends(std::span<const PeerView> views, Rank self, int waiting_for);

// Returns how much later than `self` the latest rank of the chain of waits from `waiting_for`
// entered its operation, at most `limit`. The deadline of that rank expires later by the same time.
// views[r] is the view of rank r.
Duration lag_of_chain(std::span<const PeerView> views, Rank self, int waiting_for, Duration limit);

// Returns what happened, where and why, without a remedy. Other ranks quote this sentence in their
// own messages.
std::string compose_sentence(const Roster& roster, const Failure& failure,
                             const wire::Activity& last_own);
// Returns the Error that users see: the sentence, what to do, and the record. `record_path` may be
// empty.
Error compose_error(const Roster& roster, const Failure& failure, const wire::Activity& last_own,
                    const std::string& record_path);

}  // namespace cadre
