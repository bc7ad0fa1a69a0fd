// Tests the texts of failures. A failure must read like a diagnosis and name the right culprit.
#include "cadre/core/comm/failure/diagnosis.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/op.h"

namespace cadre {
namespace {

using wire::Activity;
using wire::ActivityState;

constexpr int64_t kSecond = 1'000'000'000;

Roster roster() {
  std::vector<wire::RankAddress> rank_addresses;
  for (int rank = 0; rank < 4; ++rank) {
    wire::RankAddress rank_address;
    rank_address.host = rank < 2 ? "node0" : "node1";
    rank_address.pid = 4711 + rank;
    rank_addresses.push_back(rank_address);
  }
  return {"fsdp", 0, std::make_shared<const Layout>(std::move(rank_addresses)), {0, 1, 2, 3}};
}

Activity activity(ActivityState state, OpKind kind, uint64_t number, int64_t age_s,
                  int waiting_for = -1) {
  Activity result;
  result.state = state;
  result.number = number;
  result.fingerprint = OpDescriptor{kind, DType::kFloat32, ReduceOp::kSum, 0, 1024}.fingerprint();
  result.age_ns = age_s * kSecond;
  result.waiting_for = waiting_for;
  result.phase = "reduce";
  return result;
}

PeerView view(const Activity& what, bool answers = true) {
  PeerView result;
  result.activity = what;
  result.answers = answers;
  return result;
}

// The members of a subgroup have other rank numbers in the group than in the job.
TEST(Diagnosis, ASubgroupsRanksAreNamedWithTheirNumbersInTheJob) {
  Roster pair = roster();
  pair.group = "tp";
  pair.members = {3, 1};
  EXPECT_EQ(pair.describe(0), "rank 0 of group \"tp\" (world rank 3, node1, pid 4714)");
  EXPECT_EQ(pair.describe(1), "rank 1 of group \"tp\" (world rank 1, node0, pid 4712)");
  EXPECT_EQ(pair.describe(2), "rank 2");
  const Activity own = activity(ActivityState::kRunning, OpKind::kAllReduce, 1042, 60);
  const Error error = compose_error(pair, {ErrorCode::kTimeout, 1, "cause", own}, own, "");
  EXPECT_EQ(error.details().culprit, Rank(1));
  EXPECT_EQ(error.details().culprit_world_rank, Rank(1));
  Failure outside{.code = ErrorCode::kAborted, .cause = "cause", .outside_culprit = 2};
  const Error linked = compose_error(pair, outside, own, "");
  EXPECT_EQ(linked.details().culprit, std::nullopt);
  EXPECT_EQ(linked.details().culprit_world_rank, Rank(2));
  outside.outside_culprit = -1;
  EXPECT_EQ(compose_error(pair, outside, own, "").details().culprit_world_rank, std::nullopt);
  Roster reordered = roster();
  reordered.members = {1, 0, 2, 3};
  EXPECT_EQ(reordered.describe(0), "rank 0 of group \"fsdp\" (world rank 1, node0, pid 4712)");
  EXPECT_EQ(reordered.describe(2), "rank 2 of group \"fsdp\" (world rank 2, node1, pid 4713)");
}

TEST(Diagnosis, ATimeoutNamesWhoIsWaitedForAndWhatItWasLastSeenDoing) {
  const Activity own = activity(ActivityState::kRunning, OpKind::kAllReduce, 1042, 60);
  const PeerView peer = view(activity(ActivityState::kRunning, OpKind::kAllGather, 1041, 61));
  const Error error =
      compose_error(roster(), {ErrorCode::kTimeout, 3, timeout_cause(roster(), 3, peer), own}, own,
                    "logs/flight/rank0");
  EXPECT_EQ(error.code(), ErrorCode::kTimeout);
  EXPECT_EQ(error.message(),
            "all_reduce #1042 on group \"fsdp\" timed out after 60 s on rank 0 (node0, pid 4711)\n"
            "  waiting for rank 3 (node1, pid 4714): last seen in all_gather #1041, reduce, 61 s "
            "ago. Remedy: check that every rank calls this operation; then restart the job or call "
            "rejoin(). Record: logs/flight/rank0");
}

TEST(Diagnosis, AnErrorHasTheCulpritTheReporterAndTheOperationAsFields) {
  const Activity own = activity(ActivityState::kRunning, OpKind::kAllReduce, 1042, 60);
  Failure failure{ErrorCode::kTimeout, 3, "late", own};
  const ErrorDetails found = compose_error(roster(), failure, own, "").details();
  EXPECT_EQ(found.culprit, 3);
  EXPECT_EQ(found.reporter, 0);
  EXPECT_EQ(found.operation, "all_reduce");
  EXPECT_EQ(found.operation_number, 1042U);
  failure = {ErrorCode::kAborted, -1, "abort() was called", {}};
  failure.reporter = 2;
  const ErrorDetails told = compose_error(roster(), failure, own, "").details();
  EXPECT_FALSE(told.culprit);
  EXPECT_EQ(told.reporter, 2);
  EXPECT_EQ(told.operation, "");
  EXPECT_FALSE(told.operation_number);
}

// Only ranks that refer to another rank's failure are advised to look at the first failure.
TEST(Diagnosis, TheRankThatAbortsIsNotSentToLookForAFirstFailure) {
  const Activity own = activity(ActivityState::kRunning, OpKind::kAllReduce, 3, 1);
  Failure failure{ErrorCode::kAborted, -1, "abort() was called: no data", own};
  EXPECT_THAT(compose_error(roster(), failure, own, "").message(),
              ::testing::EndsWith(
                  "abort() was called: no data. Remedy: restart the job or call rejoin()."));
  failure.reporter = 2;
  EXPECT_THAT(compose_error(roster(), failure, own, "").message(),
              ::testing::EndsWith(
                  "Remedy: look at the first failure, then restart the job or call rejoin()."));
}

// The only mistake may be that sender and receiver use different tags, so the remedy mentions the
// tag.
TEST(Diagnosis, AMessageThatTimesOutPointsToItsTag) {
  for (const OpKind kind : {OpKind::kSend, OpKind::kRecv}) {
    const Activity own = activity(ActivityState::kRunning, kind, 2, 1);
    const Error error = compose_error(roster(), {ErrorCode::kTimeout, 3, "tag 7", own}, own, "");
    EXPECT_THAT(error.message(),
                ::testing::EndsWith(
                    "tag 7. Remedy: check that the other rank calls the matching "
                    "send or recv, with the same tag; then restart the job or call rejoin()."));
  }
}

TEST(Diagnosis, WhatOtherRanksQuoteHasNoRemedy) {
  const Activity own = activity(ActivityState::kRunning, OpKind::kBarrier, 2, 1);
  const Failure failure{ErrorCode::kTimeout, 3, "waiting for rank 3", own};
  EXPECT_EQ(compose_sentence(roster(), failure, own),
            "barrier #2 on group \"fsdp\" timed out after 1.0 s on rank 0 (node0, pid 4711)\n"
            "  waiting for rank 3");
}

TEST(Diagnosis, ASilentRankIsCalledSilent) {
  const PeerView peer =
      view(activity(ActivityState::kDone, OpKind::kBarrier, 7, 5), /*answers=*/false);
  EXPECT_EQ(timeout_cause(roster(), 2, peer),
            "waiting for rank 2 (node1, pid 4713), which does not answer: last seen after barrier "
            "#7, 5.0 s ago");
}

TEST(Diagnosis, ALostRankBetweenOperations) {
  const Activity own = activity(ActivityState::kDone, OpKind::kAllReduce, 5, 1);
  const PeerView peer = view(activity(ActivityState::kRunning, OpKind::kAllReduce, 6, 2));
  const Error error = compose_error(
      roster(), {ErrorCode::kPeerLost, 3, gone_cause(roster(), 3, peer), {}}, own, "");
  EXPECT_EQ(error.message(),
            "group \"fsdp\" failed on rank 0 (node0, pid 4711) after all_reduce #5\n"
            "  rank 3 (node1, pid 4714) is gone: its connection ended, last seen in all_reduce #6, "
            "reduce, 2.0 s ago. Remedy: restart the job or call rejoin().");
}

TEST(Diagnosis, WhatShowedThatARankIsGoneIsSaid) {
  const PeerView peer = view(activity(ActivityState::kDone, OpKind::kBarrier, 7, 130));
  EXPECT_EQ(gone_cause(roster(), 2, peer, SignOfLoss::kSilence),
            "rank 2 (node1, pid 4713) is gone: it sends nothing although its connection is open, "
            "last seen after barrier #7, 130 s ago");
  EXPECT_EQ(gone_cause(roster(), 2, peer, SignOfLoss::kNamedByLauncher),
            "rank 2 (node1, pid 4713) is gone: the launcher has lost its host, last seen after "
            "barrier #7, 130 s ago");
  EXPECT_EQ(gone_cause(roster(), 2, peer, SignOfLoss::kProcessEnded),
            "rank 2 (node1, pid 4713) is gone: its process ended, last seen after barrier #7, 130 "
            "s ago");
}

TEST(Diagnosis, ARankThatEndedItsLoopEarlyHasItsOwnSentence) {
  EXPECT_EQ(left_cause(roster(), 2, 17),
            "rank 2 (node1, pid 4713) left the group after #17 (it ended its loop early?)");
  EXPECT_EQ(left_cause(roster(), 2, 0),
            "rank 2 (node1, pid 4713) left the group before its first collective (it ended its "
            "loop early?)");
}

TEST(Diagnosis, AMismatchReadsTheSameOnBothRanks) {
  const Fingerprint reduce =
      OpDescriptor{OpKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 0, 1024}.fingerprint();
  const Fingerprint gather =
      OpDescriptor{OpKind::kAllGather, DType::kFloat32, ReduceOp::kSum, 0, 4}.fingerprint();
  const std::string text = mismatch_cause(roster(), {{0, 7, reduce}, {2, 7, gather}});
  EXPECT_EQ(text, mismatch_cause(roster(), {{2, 7, gather}, {0, 7, reduce}}));
  EXPECT_EQ(text,
            "the ranks disagree: rank 0 (node0, pid 4711) called all_reduce(sum, float32 x 1024) "
            "as #7, rank 2 (node1, pid 4713) called all_gather(float32 x 4) as #7");
  EXPECT_EQ(culprit_of({{0, 7, reduce}, {2, 7, gather}}), 2);
  EXPECT_EQ(culprit_of({{2, 7, gather}, {0, 7, reduce}}), 2);
}

TEST(Diagnosis, TheRemedyOfAMismatchFitsWhatDiffers) {
  const std::vector<int64_t> table = {2, 512};
  const OpDescriptor usual{OpKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 0, 1024};
  const auto remedy = [](const OpDescriptor& one, const OpDescriptor& other, uint64_t number = 7) {
    const std::string text =
        mismatch_remedy({{0, 7, one.fingerprint()}, {1, number, other.fingerprint()}});
    EXPECT_EQ(text, mismatch_remedy({{1, number, other.fingerprint()}, {0, 7, one.fingerprint()}}));
    return text;
  };
  const auto pass = [](std::string_view what) {
    return format("pass {} on all ranks, unless a rank has left out an earlier call", what);
  };
  const std::string in_order = "let all ranks call the same operations in the same order";
  const auto with = [](OpDescriptor descriptor, const auto& change) {
    change(descriptor);
    return descriptor;
  };
  const auto shorter = [](OpDescriptor& it) { it.count = 1023; };
  const auto rows = [&](OpDescriptor& it) { it.shape = PackedShape(table); };
  const auto other_dtype = [](OpDescriptor& it) { it.dtype = DType::kInt64; };
  const auto other_reduction = [](OpDescriptor& it) { it.reduce_op = ReduceOp::kMax; };
  EXPECT_EQ(remedy(usual, with(usual, shorter)), pass("tensors of one shape"));
  EXPECT_EQ(remedy(usual, with(usual, rows)), pass("tensors of one shape"));
  EXPECT_EQ(remedy(usual, with(usual, other_dtype)), pass("tensors of one dtype"));
  EXPECT_EQ(remedy(usual, with(usual, other_reduction)), pass("the same reduction"));
  const OpDescriptor both = with(with(usual, shorter), other_dtype);
  EXPECT_EQ(remedy(usual, with(both, other_reduction)),
            pass("tensors of one shape and dtype and the same reduction"));
  OpDescriptor rooted = usual;
  rooted.kind = OpKind::kReduce;
  EXPECT_EQ(remedy(rooted, with(rooted, [](OpDescriptor& it) { it.root = 1; })),
            pass("the same root"));
  OpDescriptor listed = usual;
  listed.num_coalesced = 2;
  EXPECT_EQ(remedy(listed, with(listed, [](OpDescriptor& it) { it.num_coalesced = 3; })),
            pass("lists of one length"));
  const OpDescriptor gathered{.kind = OpKind::kAllGather, .count = 4};
  const OpDescriptor uneven{.kind = OpKind::kAllGatherV, .count = 9, .shape = PackedShape(table)};
  EXPECT_EQ(remedy(gathered, uneven), pass("the same sizes of parts"));
  EXPECT_EQ(remedy(uneven, with(uneven, other_dtype)), pass("tensors of one dtype"));
  EXPECT_EQ(remedy({.kind = OpKind::kAllToAll, .count = 4}, {.kind = OpKind::kAllToAllV}),
            "pass split sizes on all ranks or on none");
  EXPECT_EQ(
      remedy({.kind = OpKind::kAllocate, .count = 4}, {.kind = OpKind::kAllocate, .count = 8}),
      pass("the same number of bytes"));
  EXPECT_EQ(remedy(usual, gathered), in_order);
  EXPECT_EQ(remedy(usual, with(usual, shorter), 8), in_order);
}

// All ranks print the remedy, including those that learned of the failure from another rank.
TEST(Diagnosis, TheRemedyOfACauseReplacesThatOfItsCode) {
  const Activity own = activity(ActivityState::kRunning, OpKind::kAllReduce, 3, 1);
  const auto ends_with = [](const char* text) { return ::testing::EndsWith(text); };
  const wire::AbortNotice notice{ErrorCode::kInvalidArgument, 1, 1, "cause", "", "pass one"};
  const Failure told = failure_from_notice(notice, /*is_loss=*/false, {1, 1});
  EXPECT_THAT(compose_error(roster(), told, own, "").message(),
              ends_with("cause. Remedy: pass one."));
  wire::AbortNotice late = notice;
  late.code = ErrorCode::kTimeout;
  EXPECT_THAT(
      compose_error(roster(), failure_from_notice(late, false, {1, 1}), own, "").message(),
      ends_with("Remedy: look at the first failure, then restart the job or call rejoin()."));
}

TEST(Diagnosis, SendsThatWaitForEachOtherAreARing) {
  const auto in = [](OpKind kind, int waiting_for) {
    return view(activity(ActivityState::kRunning, kind, 3, 1, waiting_for));
  };
  const PeerView to_0 = in(OpKind::kSend, 0);
  const PeerView to_2 = in(OpKind::kSend, 2);
  EXPECT_TRUE(is_ring_of_sends(std::vector{PeerView(), to_0}, 0, 1));
  EXPECT_TRUE(is_ring_of_sends(std::vector{PeerView(), to_2, to_0}, 0, 1));
  EXPECT_FALSE(is_ring_of_sends(std::vector{PeerView(), to_2, in(OpKind::kRecv, 0)}, 0, 1));
  EXPECT_FALSE(is_ring_of_sends(std::vector{PeerView(), to_2, in(OpKind::kSend, 1)}, 0, 1));
  EXPECT_FALSE(is_ring_of_sends(std::vector{PeerView(), in(OpKind::kSend, -1)}, 0, 1));
  const PeerView done = view(activity(ActivityState::kDone, OpKind::kSend, 3, 1, 0));
  EXPECT_FALSE(is_ring_of_sends(std::vector{PeerView(), done}, 0, 1));
}

TEST(Diagnosis, AMismatchThatSeveralFindIsToldOfTheSameTwoRanks) {
  const auto in = [](ActivityState state, OpKind kind, uint64_t number) {
    return view(activity(state, kind, number, 1));
  };
  const PeerView sums = in(ActivityState::kRunning, OpKind::kAllReduce, 7);
  const PeerView meets = in(ActivityState::kFailed, OpKind::kBarrier, 7);
  const PeerView is_late = in(ActivityState::kDone, OpKind::kAllReduce, 6);
  const auto call = [](int rank, const PeerView& what) {
    return Call{rank, 7, what.activity.fingerprint};
  };
  // Rank 1 differs from all others. Ranks 0, 2 and 3 notice the mismatch.
  const std::vector views = {sums, meets, sums, sums};
  for (const int finder : {0, 2, 3}) {
    const Mismatch told = first_mismatch(views, {call(finder, sums), call(1, meets)});
    EXPECT_EQ(told.one.rank, 0);
    EXPECT_EQ(told.other.rank, 1);
    EXPECT_EQ(told.other.fingerprint, meets.activity.fingerprint);
  }
  // Rank 0 has not entered the operation yet. The calls of the two ranks that noticed the mismatch
  // are known, whatever operation they run now.
  const Mismatch told =
      first_mismatch(std::vector{is_late, is_late, sums, meets}, {call(3, meets), call(1, sums)});
  EXPECT_EQ(told.one.rank, 1);
  EXPECT_EQ(told.other.rank, 3);
}

// Rank 0 has sent its data of a scatter and runs the next operation, so its call is not known. Rank
// 1 called something else.
TEST(Diagnosis, ARankThatHasCompletedTheOperationMayBeInALowerPair) {
  const PeerView before = view(activity(ActivityState::kDone, OpKind::kScatter, 4, 1));
  const PeerView inside = view(activity(ActivityState::kRunning, OpKind::kScatter, 5, 1));
  const PeerView passed = view(activity(ActivityState::kDone, OpKind::kScatter, 5, 1));
  const PeerView beyond = view(activity(ActivityState::kRunning, OpKind::kBarrier, 6, 1));
  const Mismatch upper{{2, 5, inside.activity.fingerprint}, {1, 5, beyond.activity.fingerprint}};
  EXPECT_TRUE(may_have_lower_pair(std::vector{passed, inside, inside}, upper));
  EXPECT_TRUE(may_have_lower_pair(std::vector{beyond, inside, inside}, upper));
  EXPECT_FALSE(may_have_lower_pair(std::vector{before, inside, beyond}, upper));
  EXPECT_FALSE(may_have_lower_pair(std::vector{inside, inside, beyond}, upper));
  const Mismatch lowest{{0, 5, inside.activity.fingerprint}, {1, 5, beyond.activity.fingerprint}};
  EXPECT_FALSE(may_have_lower_pair(std::vector{beyond, beyond, beyond}, lowest));
}

TEST(Diagnosis, NewsDuringAnOperationDoNotBlameIt) {
  const Activity own = activity(ActivityState::kRunning, OpKind::kAllReduce, 3, 1);
  const Error error =
      compose_error(roster(), {ErrorCode::kPeerLost, 2, left_cause(roster(), 2, 3), {}}, own, "");
  EXPECT_EQ(error.message(),
            "group \"fsdp\" failed on rank 0 (node0, pid 4711) during all_reduce #3\n"
            "  rank 2 (node1, pid 4713) left the group after #3 (it ended its loop early?). "
            "Remedy: restart the job or call rejoin().");
}

TEST(Diagnosis, TheCulpritIsFoundAlongWhoWaitsForWhom) {
  const auto inside = [](int waiting_for) {
    return view(activity(ActivityState::kRunning, OpKind::kAllReduce, 9, 1, waiting_for));
  };
  const auto culprit = [](const std::vector<PeerView>& views, int waiting_for) {
    return find_culprit(views, 0, 9, waiting_for);
  };
  const PeerView behind = view(activity(ActivityState::kDone, OpKind::kAllReduce, 8, 1));
  const PeerView silent = view(activity(ActivityState::kRunning, OpKind::kAllReduce, 9, 1), false);
  // Rank 0 waits for rank 1, rank 1 for rank 2, and rank 2 for rank 3. The culprit is rank 3, which
  // has not called the operation yet, or rank 2 if it is silent.
  EXPECT_EQ(culprit({PeerView(), inside(2), inside(3), behind}, 1).rank, 3);
  EXPECT_TRUE(culprit({PeerView(), inside(2), inside(3), behind}, 1).is_certain);
  EXPECT_EQ(culprit({PeerView(), inside(2), silent, inside(0)}, 1).rank, 2);
  EXPECT_TRUE(culprit({PeerView(), inside(2), silent, inside(0)}, 1).is_certain);
  // The engine does not name the awaited rank. Then a silent rank takes precedence over a late one.
  EXPECT_EQ(culprit({PeerView(), behind, inside(-1), silent}, -1).rank, 3);
  EXPECT_EQ(culprit({PeerView(), behind, inside(-1), inside(-1)}, -1).rank, 1);
  // If all ranks wait in a cycle, the culprit is the rank for which this rank waits. The finding is
  // uncertain, because another rank may have better evidence.
  EXPECT_EQ(culprit({PeerView(), inside(2), inside(0)}, 1).rank, 1);
  EXPECT_FALSE(culprit({PeerView(), inside(2), inside(0)}, 1).is_certain);
  // Ranks 2 and 3 wait for each other, and this rank is not in their cycle. The culprit is one of
  // the two.
  EXPECT_EQ(culprit({PeerView(), inside(2), inside(3), inside(2)}, 1).rank, 2);
  EXPECT_FALSE(culprit({PeerView(), inside(2), inside(3), inside(2)}, 1).is_certain);
}

TEST(Diagnosis, TheCulpritIsFoundThroughOtherOperations) {
  const auto in = [](OpKind kind, uint64_t number, int waiting_for) {
    return view(activity(ActivityState::kRunning, kind, number, 1, waiting_for));
  };
  const PeerView silent = view(activity(ActivityState::kDone, OpKind::kAllReduce, 8, 1), false);
  // Rank 0 waits in a collective for rank 1, which receives from rank 2, which waits in an earlier
  // collective for rank 3.
  const std::vector views = {PeerView(), in(OpKind::kRecv, 4, 2), in(OpKind::kBarrier, 8, 3),
                             silent};
  EXPECT_EQ(find_culprit(views, 0, 9, 1).rank, 3);
  // The same culprit is found if rank 0 waits for a message.
  EXPECT_EQ(find_culprit(views, 0, std::nullopt, 1).rank, 3);
  // A rank that is in a later collective has sent the data for which this rank waits. The data was
  // lost, or has not arrived yet.
  const std::vector passed = {PeerView(), in(OpKind::kBarrier, 10, 2), in(OpKind::kBarrier, 10, 0)};
  EXPECT_EQ(find_culprit(passed, 0, 9, 1).rank, 1);
  EXPECT_FALSE(find_culprit(passed, 0, 9, 1).is_certain);
}

// A process that is not scheduled for a moment is silent. If no rank waits for it, it must not be
// named instead of the awaited rank.
TEST(Diagnosis, AnAwaitedRankThatHasNotComeIsNamedBeforeASilentOneOutsideTheChain) {
  const auto inside = [](int waiting_for) {
    return view(activity(ActivityState::kRunning, OpKind::kAllReduce, 9, 1, waiting_for));
  };
  const PeerView behind = view(activity(ActivityState::kDone, OpKind::kAllReduce, 8, 1));
  const PeerView fresh = view(Activity());
  const PeerView silent =
      view(activity(ActivityState::kRunning, OpKind::kAllReduce, 9, 1, /*waiting_for=*/0), false);
  const auto expect_named = [](int rank, const std::vector<PeerView>& views, int waiting_for) {
    const Suspect found = find_culprit(views, 0, 9, waiting_for);
    EXPECT_EQ(found.rank, rank);
    EXPECT_TRUE(found.is_certain);
  };
  expect_named(1, {PeerView(), behind, silent}, 1);
  expect_named(1, {PeerView(), fresh, silent}, 1);
  expect_named(2, {PeerView(), silent, behind}, 2);
  expect_named(2, {PeerView(), silent, silent}, 2);
  // The awaited rank is at the end of a longer chain, which may include a message.
  expect_named(2, {PeerView(), inside(2), behind, silent}, 1);
  const PeerView receives = view(activity(ActivityState::kRunning, OpKind::kRecv, 4, 1, 2));
  expect_named(2, {PeerView(), receives, behind, silent}, 1);
  expect_named(2, {PeerView(), receives, behind, inside(0)}, 1);  // also if no rank is silent
  // The awaited rank did not send the message.
  const Suspect sender = find_culprit(std::vector{PeerView(), behind, silent}, 0, std::nullopt, 1);
  EXPECT_EQ(sender.rank, 1);
  EXPECT_TRUE(sender.is_certain);
}

// A silent process (stopped by SIGSTOP) is the culprit. The awaited rank, which may wait for it, is
// not.
TEST(Diagnosis, ARankThatShowsAMessageMayHavePassedTheCollective) {
  const PeerView awaited = view(activity(ActivityState::kDone, OpKind::kSend, 4, 1));
  const PeerView silent = view(activity(ActivityState::kRunning, OpKind::kAllReduce, 9, 1), false);
  EXPECT_EQ(find_culprit(std::vector{PeerView(), awaited, silent}, 0, 9, 1).rank, 2);
}

TEST(Diagnosis, ASilentRankIsNamedUnlessTheAwaitedOneHasCertainlyNotCome) {
  const auto in = [](uint64_t number, int waiting_for) {
    return view(activity(ActivityState::kRunning, OpKind::kAllReduce, number, 1, waiting_for));
  };
  const PeerView behind = view(activity(ActivityState::kDone, OpKind::kAllReduce, 8, 1));
  const PeerView silent = view(activity(ActivityState::kDone, OpKind::kAllReduce, 8, 1), false);
  const auto expect_named = [](int rank, const std::vector<PeerView>& views, int waiting_for) {
    const Suspect found = find_culprit(views, 0, 9, waiting_for);
    EXPECT_EQ(found.rank, rank);
    EXPECT_TRUE(found.is_certain);
  };
  // A rank of the chain waits for the silent rank, in this operation or in an earlier one. The last
  // rank is late, but no rank waits for it.
  expect_named(1, {PeerView(), silent, behind}, 1);
  expect_named(2, {PeerView(), in(9, 2), silent, behind}, 1);
  expect_named(2, {PeerView(), in(8, 2), silent, behind}, 1);
  // The awaited rank may wait for the silent rank in another group.
  PeerView elsewhere = behind;
  elsewhere.elsewhere = "all_reduce #2 of group \"tp\"";
  expect_named(2, {PeerView(), elsewhere, silent}, 1);
  // The awaited rank is in this or an earlier operation, and it is not known why.
  expect_named(2, {PeerView(), in(9, -1), silent}, 1);
  expect_named(2, {PeerView(), in(8, -1), silent}, 1);
  const PeerView stuck = view(activity(ActivityState::kFailed, OpKind::kAllReduce, 9, 1));
  expect_named(2, {PeerView(), stuck, silent}, 1);
  // The awaited rank has completed the operation.
  const PeerView passed = view(activity(ActivityState::kDone, OpKind::kAllReduce, 9, 1));
  expect_named(2, {PeerView(), passed, silent}, 1);
  // The ranks wait in a cycle, or the operation does not publish for which rank it waits.
  expect_named(3, {PeerView(), in(9, 2), in(9, 1), silent}, 1);
  expect_named(2, {PeerView(), behind, silent}, -1);
}

// Two hosts cannot reach each other. Control messages take a route over a third host, so no rank is
// silent.
TEST(Diagnosis, ALostStreamIsBlamedOnTheRanksAtItsEnds) {
  const auto in = [](uint64_t number, int waiting_for) {
    return view(activity(ActivityState::kRunning, OpKind::kBarrier, number, 1, waiting_for));
  };
  const PeerView passed = view(activity(ActivityState::kDone, OpKind::kBarrier, 9, 1));
  // Rank 0 waits for rank 1, which waits for rank 3, which waits in an earlier collective for rank
  // 0.
  EXPECT_EQ(find_culprit(std::vector{PeerView(), in(9, 3), in(9, 1), in(8, 0)}, 0, 9, 1).rank, 3);
  // Ranks 0 and 1 wait for each other, and the others have completed the operation.
  EXPECT_EQ(find_culprit(std::vector{PeerView(), in(9, 0), passed, passed}, 0, 9, 1).rank, 1);
  // Rank 0 waits for rank 1, which waits in an earlier collective for rank 2, which has completed
  // that collective.
  EXPECT_EQ(find_culprit(std::vector{PeerView(), in(8, 2), in(9, 0), in(9, 1)}, 0, 9, 1).rank, 2);
  // Ranks that have completed the operation are not late.
  EXPECT_EQ(find_culprit(std::vector{PeerView(), passed, passed, in(8, -1)}, 0, 9, -1).rank, 3);
}

TEST(Diagnosis, TheLagOfAChainIsThatOfTheRankThatCameLast) {
  const auto waits = [](int waiting_for, Duration age) {
    PeerView one = view(activity(ActivityState::kRunning, OpKind::kBarrier, 9, 1, waiting_for));
    one.activity.age_ns = age.count();
    return one;
  };
  using std::chrono::milliseconds;
  using std::chrono::seconds;
  const std::vector views = {waits(1, milliseconds(900)), waits(2, milliseconds(950)),
                             waits(0, milliseconds(200)), waits(1, milliseconds(50))};
  EXPECT_EQ(lag_of_chain(views, 0, 1, seconds(2)), milliseconds(700));
  EXPECT_EQ(lag_of_chain(views, 0, 1, milliseconds(300)), milliseconds(300));
  EXPECT_EQ(lag_of_chain(views, 2, 0, seconds(2)), Duration(0));
  EXPECT_EQ(lag_of_chain(views, 0, -1, seconds(2)), Duration(0));
  // No rank of the chain waits for rank 3; ranks 1 and 2 wait for each other.
  EXPECT_EQ(lag_of_chain(std::vector{views[0], views[1], waits(1, seconds(0)), views[3]}, 0, 1,
                         seconds(2)),
            milliseconds(900));
}

TEST(Diagnosis, ARankThatRunsAnotherGroupsOperationIsSaidToDoSo) {
  PeerView peer = view(activity(ActivityState::kDone, OpKind::kBarrier, 7, 5));
  peer.elsewhere = "all_reduce #2 of group \"tp\"";
  EXPECT_EQ(timeout_cause(roster(), 2, peer),
            "waiting for rank 2 (node1, pid 4713): last seen after barrier #7, 5.0 s ago, now in "
            "all_reduce #2 of group \"tp\"");
}

TEST(Diagnosis, ARankThatCannotBeReachedIsSaidToBeSo) {
  PeerView peer = view(activity(ActivityState::kRunning, OpKind::kBarrier, 7, 5));
  peer.is_cut_off = true;
  EXPECT_EQ(timeout_cause(roster(), 2, peer),
            "waiting for rank 2 (node1, pid 4713), whose host takes no connection: last seen in "
            "barrier #7, reduce, 5.0 s ago");
}

TEST(Diagnosis, WhoHasEndedIsNotBlamedForItsSilence) {
  PeerView left = view(activity(ActivityState::kDone, OpKind::kBarrier, 9, 1), false);
  left.left_after = 9;
  PeerView gave_up = view(activity(ActivityState::kFailed, OpKind::kBarrier, 9, 1), false);
  gave_up.has_aborted = true;
  const PeerView silent = view(activity(ActivityState::kRunning, OpKind::kBarrier, 9, 1), false);
  const PeerView inside = view(activity(ActivityState::kRunning, OpKind::kBarrier, 9, 1, 3));
  EXPECT_EQ(find_culprit(std::vector{PeerView(), left, gave_up, silent}, 0, 9, 1).rank, 3);
  // The rank at the end of the chain has ended: its data was lost, or it reported the cause itself.
  EXPECT_EQ(find_culprit(std::vector{PeerView(), left, inside, gave_up}, 0, 9, 2).rank, 3);
  EXPECT_FALSE(find_culprit(std::vector{PeerView(), left, inside, gave_up}, 0, 9, 2).is_certain);
  EXPECT_EQ(timeout_cause(roster(), 2, left),
            "waiting for rank 2 (node1, pid 4713): left the group after #9");
}

}  // namespace
}  // namespace cadre
