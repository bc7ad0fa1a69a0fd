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
  std::vector<int> members;              // ranks of the layout, by rank of the group

  int world_size() const { return static_cast<int>(members.size()); }
  const wire::RankAddress& rank_address(int rank) const {
    return layout->rank_address(members[static_cast<size_t>(rank)]);
  }
  // "rank 3 (node1, pid 812)"; of a group of some of the job's ranks, or in another order,
  // "rank 1 of group "tp" (world rank 3, node1, pid 812)".
  std::string describe(int rank) const;
  // Whether each rank has the same number in the job.
  bool has_ranks_of_job() const;
  // In the job; -1 for a rank that is no member.
  int world_rank(int rank) const;
};

// What this rank knows of a peer at present.
struct PeerView {
  wire::Activity activity;  // as of now
  bool is_gone = false;     // lost without having left the group
  bool answers = false;     // it replied to the last status question
  // It published a failure of the group, or left the job without leaving the group first.
  bool has_aborted = false;
  std::optional<uint64_t> left_after;  // it left in good order after this many collectives
  bool is_cut_off = false;             // no connection to its host can be opened from this rank
  // What it runs in another group, from its reply to the last status question; empty for nothing.
  std::string elsewhere = {};

  // It left the group in good order, or after a failure.
  bool has_ended() const { return has_aborted || left_after; }
  // It has not ended, and did not reply to the last status question.
  bool is_silent() const { return !answers && !has_ended(); }
};

// A failure of the group on one rank, before it becomes an Error.
struct Failure {
  ErrorCode code = ErrorCode::kInternal;
  int culprit = -1;  // the rank at fault, or -1
  std::string cause;
  // The operation that failed here; nullopt when none was running.
  std::optional<wire::Activity> operation;
  int reporter = -1;  // the rank that found the first failure, or -1 for this one
  // False where an exception reports the cause to the program anyway, or the first failure is
  // logged, so a log line about this failure would only hide it.
  bool is_logged = true;
  // It follows from the failure of another group of this process. The members of this group may
  // not have heard of that one, so this rank tells them, whoever reported it.
  bool is_linked = false;
  // The culprit as a rank of the fabric, where it is no member of this group; -1 if there is none.
  // Groups that are linked with this one may have it as a member.
  int outside_culprit = -1;
  // The control plane has reported the loss of the culprit, also of one outside.
  bool is_loss = false;
  // In place of the remedy of the code, for a cause that has one of its own.
  std::string remedy = {};
};

// The remedy where a descriptor was closed from outside (os/io/fd.h).
inline constexpr std::string_view kCloseOnlyOwn =
    "let the program close only descriptors that it has opened itself, and start the job anew";

// The failure of this rank whose connections were closed from outside.
Failure closed_here(const Roster& roster);

// Prefix of the cause on a rank that refers to the failure of another rank.
inline constexpr std::string_view kFirstFailure = "first failure: ";

// The cause of a failure that follows from another one, which `sentence` describes. `cause`, that
// of the other one, may only refer to the first failure; then it has the prefix already.
std::string first_failure_cause(const std::string& cause, const std::string& sentence);

// The culprit and the reporter of an AbortNotice, in ranks of the group.
struct NoticeRanks {
  int culprit = -1;  // as in Failure
  int reporter = -1;
};
// The failure of this rank after another rank has reported one. The loss of a rank and a mismatch
// of operations are raised with the same code and cause on all ranks; any other failure is raised
// as kAborted, with a cause that refers to the failure of the reporting rank.
Failure failure_from_notice(const wire::AbortNotice& notice, bool is_loss,
                            const NoticeRanks& ranks);

// Whether the fingerprint is that of a send, a recv or a wait for a signal, which are numbered
// apart from collectives.
bool is_message(const Fingerprint& fingerprint);
// "60 s", "1.5 s", "250 ms"
std::string describe_duration(Duration duration);
// "last seen in all_gather #1041, reduce, 61 s ago", "last seen after all_gather #1041, 61 s ago"
std::string describe_last_seen(const wire::Activity& activity);
// The same, or "left the group after #1041" for a peer that has left in good order.
std::string describe_peer(const PeerView& view);

std::string gone_cause(const Roster& roster, int peer, const PeerView& view,
                       SignOfLoss sign = SignOfLoss::kConnectionEnded);
// The lowest rank that has left, or -1.
int first_left(std::span<const PeerView> views);
// Why a receive from any rank cannot end: all streams have. error: that of one of the streams.
std::string all_left_cause(const Roster& roster, std::span<const PeerView> views,
                           const Error& error);
std::string left_cause(const Roster& roster, int peer, uint64_t left_after);
std::string timeout_cause(const Roster& roster, int culprit, const PeerView& view);
// What one rank called.
struct Call {
  int rank = -1;
  uint64_t number = 0;
  Fingerprint fingerprint = {};
};
// Two ranks that called different things as the same operation.
struct Mismatch {
  Call one;
  Call other;
};
// The lowest mismatching pair: of the ranks known to be in the operation of found.one, the lowest
// one and the lowest one that called something else. Ranks with equal views return the same pair,
// whichever of them found the mismatch. `found` itself if the views show no such pair. `views` is
// by rank.
Mismatch first_mismatch(std::span<const PeerView> views, const Mismatch& found);
// Whether a rank below both of the pair has completed the operation. What it called is not in its
// view then, but a rank that received something of it knows, and reports a lower pair.
bool may_have_lower_pair(std::span<const PeerView> views, const Mismatch& mismatch);
// The higher rank of the pair, which is at fault as far as anybody can say: ranks that report the
// same pair name the same rank, also when it is themselves.
int culprit_of(const Mismatch& mismatch);
// Reads the same on all ranks.
std::string mismatch_cause(const Roster& roster, const Mismatch& mismatch);
// What the program must pass, by what differs; the same on all ranks.
std::string mismatch_remedy(const Mismatch& mismatch);
// For two ranks that left the group after different collectives, or after different numbers of
// them; `one` is the last call of this rank.
Error end_mismatch_error(const Roster& roster, const Mismatch& mismatch,
                         const std::string& record_path);
// Reads the same on all ranks.
std::string part_mismatch_cause(const Roster& roster, const OpProgress::PartMismatch& mismatch,
                                DType dtype);
// The remedies of failures that other files find.
inline constexpr std::string_view kEqualParts =
    "let each rank expect from every other rank what that rank sends to it: output split sizes "
    "are compared with the input split sizes of the senders";
inline constexpr std::string_view kMatchingMessages =
    "let each send have one recv with its tag, number of elements and dtype";
inline constexpr std::string_view kNoRingOfSends =
    "use send_async or batch_send_recv, because each of these ranks waits in a send for the recv "
    "of the next; then rebuild the group";

// The rank that keeps an operation from completing.
struct Suspect {
  int rank = -1;
  // The rank does not answer, or waits for no other rank. If false, another rank may have better
  // evidence: it may be unable to reach the rank that it waits for.
  bool is_certain = false;
};

// The root cause of a wait: follows the chain of waits from `waiting_for` up to a rank that is
// silent, that waits for no other rank, or that has passed collective `number` (nullopt for a
// message). Returns the first that exists:
// 1. the rank at the end of this chain if it is silent, or if it answers, is in no operation of any
//    group and has not passed the one in which it is awaited;
// 2. a silent rank outside the chain;
// 3. another rank of the chain: one in a circle of waits, one that has ended, well or with a
//    failure of its own, or one that runs something else;
// 4. a rank outside the chain that has not reached collective `number`.
// `views` is by rank.
Suspect find_culprit(std::span<const PeerView> views, Rank self, std::optional<uint64_t> number,
                     int waiting_for);

// Whether each rank of the chain of waits from `waiting_for` is in a send to the next one, up to
// `self`. `views` is by rank.
bool is_ring_of_sends(std::span<const PeerView> views, Rank self, int waiting_for);

// How much later than `self` the latest rank of the chain of waits from `waiting_for` entered its
// operation, at most `limit`. The deadline of that rank expires later by the same time. `views` is
// by rank.
Duration lag_of_chain(std::span<const PeerView> views, Rank self, int waiting_for, Duration limit);

// What happened, where and why, without a remedy. Other ranks quote this sentence in their
// messages.
std::string compose_sentence(const Roster& roster, const Failure& failure,
                             const wire::Activity& last_own);
// The Error that users see: the sentence, what to do, and the record. `record_path` may be empty.
Error compose_error(const Roster& roster, const Failure& failure, const wire::Activity& last_own,
                    const std::string& record_path);

}  // namespace cadre
