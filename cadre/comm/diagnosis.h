// The sentences of failures: what happened to which operation, which rank is at fault and what it
// was last seen doing, and what to do about it.
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

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/base/types.h"
#include "cadre/collective/op.h"
#include "cadre/comm/fabric/group_events.h"
#include "cadre/comm/fabric/layout.h"
#include "cadre/wire/control.h"

namespace cadre {

// Who is who in a group.
struct Roster {
  std::string group;
  Rank self;
  std::shared_ptr<const Layout> layout;  // shared with the fabric and its other groups
  std::vector<int> members;              // ranks of the layout, by rank of the group

  int world_size() const { return static_cast<int>(members.size()); }
  const wire::RankCard& card(int rank) const {
    return layout->card(members[static_cast<size_t>(rank)]);
  }
  // "rank 3 (node1, pid 812)"
  std::string describe(int rank) const;
};

// What is known of a peer just now.
struct PeerView {
  wire::Activity activity;             // as of now
  bool is_gone = false;                // lost without having left the group
  bool answers = false;                // it replied to the last question
  bool has_aborted = false;            // it said why it gave up, and may have closed since
  std::optional<uint64_t> left_after;  // it left in good order after this many collectives
  bool is_cut_off = false;             // no connection to its host can be opened from this rank
  // What it runs in another group meanwhile, as it said when it was asked; else empty.
  std::string elsewhere = {};

  // Well, or with a failure of its own.
  bool has_ended() const { return has_aborted || left_after; }
  // Nobody tells what it does, and why.
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
  // False where the program learns the cause from elsewhere, so that a line about this one would
  // only come before it.
  bool is_logged = true;
};

// What begins the sentence of a rank that points to the failure of another one.
inline constexpr std::string_view kFirstFailure = "first failure: ";

struct ToldBy {
  int culprit = -1;  // as in Failure
  int reporter = -1;
};
// What a failure that another rank told means on this one. The loss of a rank and a disagreement
// concern all ranks alike; all else is the sender's failure, to which this rank points.
Failure failure_told(const wire::AbortNotice& notice, bool is_loss, const ToldBy& by);

// Whether the fingerprint is that of a send, a recv or a wait for a signal, which are numbered
// apart from collectives.
bool is_message(const Fingerprint& fingerprint);
// Whether the rank runs an operation, or is stuck in one that has failed.
bool is_in_operation(const wire::Activity& activity);
// "all_reduce #1042"
std::string describe_operation(uint64_t number, const Fingerprint& fingerprint);
// "60 s", "1.5 s", "250 ms"
std::string describe_duration(Duration duration);
// "last seen in all_gather #1041, reduce, 61 s ago", "last seen after all_gather #1041, 61 s ago"
std::string describe_last_seen(const wire::Activity& activity);
// The same for users: "left the group after #1041" where it applies.
std::string describe_peer(const PeerView& view);

std::string gone_cause(const Roster& roster, int peer, const PeerView& view,
                       SignOfLoss sign = SignOfLoss::kConnectionEnded);
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
// The same for all who look at one moment, whichever of them found out: of the ranks known to be in
// the operation of found.one, the lowest and the first that differs from it. `views` is by rank.
Mismatch first_mismatch(std::span<const PeerView> views, const Mismatch& found);
// Reads the same on all ranks.
std::string mismatch_cause(const Roster& roster, const Mismatch& mismatch);
// Two ranks left the group after different collectives, or different numbers of them; `one` is this
// rank's last call.
Error end_mismatch_error(const Roster& roster, const Mismatch& mismatch,
                         const std::string& record_path);
// Reads the same on all ranks.
std::string part_mismatch_cause(const Roster& roster, const OpProgress::PartMismatch& mismatch,
                                DType dtype);

// Who is at fault that an operation does not end.
struct Suspect {
  int rank = -1;
  // It does not answer, or waits for nobody. Else another rank may know better, who cannot reach
  // the one that it waits for.
  bool is_certain = false;
};

// The rank that is really waited for: from `waiting_for` along who waits for whom, up to a rank
// that is silent, that waits for nobody, or that has passed collective `number` (nullopt for a
// message). In this order:
// 1. the rank at the end of this chain if it is silent, or if it answers, is in no operation of any
//    group and has not passed the one in which it is awaited;
// 2. a silent rank outside the chain;
// 3. another rank of the chain: one in a circle of waits, one that has ended, well or with a
//    failure of its own, or one that runs something else;
// 4. a rank outside the chain that has not reached collective `number`.
// `views` is by rank.
Suspect find_culprit(std::span<const PeerView> views, Rank self, std::optional<uint64_t> number,
                     int waiting_for);

// By how much the ranks that `self` waits for, one behind the other, entered their operations later
// than `self` did, which reach their deadlines later by as much; at most `limit`. `views` is by
// rank.
Duration lag_of_chain(std::span<const PeerView> views, Rank self, int waiting_for, Duration limit);

// What happened where, and why, without a remedy: what other ranks quote.
std::string compose_sentence(const Roster& roster, const Failure& failure,
                             const wire::Activity& last_own);
// The Error that users see: the sentence, what to do, and the record. `record_path` may be empty.
Error compose_error(const Roster& roster, const Failure& failure, const wire::Activity& last_own,
                    const std::string& record_path);

}  // namespace cadre
