// Tests the errors of the host engine if ranks call different operations, are missing or are
// interrupted.
#include <gtest/gtest.h>

#include "cadre/testing/core/host_engine_ranks.h"
#include "cadre/testing/core/process_ranks.h"

namespace cadre {
namespace {

using testing::RankContext;
using testing::require;
using testing::run_ranks_as_processes;
using testing::run_ranks_as_threads;

void require_code(const Status& status, ErrorCode code) {
  require(!status.ok(), "the operation did not fail");
  require(status.error().code() == code, status.error().message());
}

TEST(HostEngineMismatchTest, EveryRankLearnsWhatAnotherCalled) {
  TestMemory memory(3);
  const auto result = run_ranks_as_threads(3, [&](RankContext& context) {
    TestRank rank(context, memory);
    std::vector<std::byte> data(4000);
    rank.barrier().value_or_throw();
    const bool is_odd_one = context.rank == 1;
    const Status status = is_odd_one ? rank.barrier() : rank.all_reduce(data, data, kFloatSum);
    require_code(status, ErrorCode::kInvalidArgument);
    const OpDescriptor theirs =
        OpDescriptor::from_fingerprint(rank.progress().mismatch_fingerprint);
    require(rank.progress().mismatch_number == 2, "the wrong number");
    require(theirs.to_string() == (is_odd_one ? "all_reduce(sum, float32 x 1000)" : "barrier()"),
            theirs.to_string());
    require((rank.progress().mismatch_peer == 1) != is_odd_one, "the wrong peer");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Ranks 1 and 2 call different operations. Both wait for rank 0, which never enters; they must
// still detect the mismatch at once.
TEST(HostEngineMismatchTest, IsFoundWithoutWaitingForThoseWhoAreMissing) {
  TestMemory memory(3);
  const auto result = run_ranks_as_threads(3, [&](RankContext& context) {
    if (context.rank == 0) return;
    TestRank rank(context, memory);
    std::vector<std::byte> data(static_cast<size_t>(context.rank.value) * 8);
    require_code(rank.all_reduce(data, data, kFloatSum), ErrorCode::kInvalidArgument);
    require(rank.progress().mismatch_peer == 3 - context.rank, "the wrong peer");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Both ranks pass three collectives in one call, and the second one of rank 1 differs from that of
// rank 0. The first collective must complete, and the third one must not run.
TEST(HostEngineMismatchTest, ACallOfSeveralCollectivesEndsAtTheFirstThatDiffers) {
  TestMemory memory(2);
  const auto result = run_ranks_as_threads(2, [&](RankContext& context) {
    TestRank rank(context, memory);
    std::vector<float> values(3, 1.0F);
    std::vector<Collective> call;
    for (float& value : values) {
      const Bytes data = std::as_writable_bytes(std::span(&value, 1));
      call.push_back(Collective::all_reduce(data, data, DType::kFloat32, ReduceOp::kSum));
    }
    rank.submit(call).value_or_throw();
    require(values == std::vector<float>(3, 2.0F), "a sum is wrong");
    if (context.rank == 1) call[1].reduction = ReduceOp::kMax;
    require_code(rank.submit(call), ErrorCode::kInvalidArgument);
    require(rank.progress().index() == 1, "another collective of the call is at fault");
    require(rank.progress().mismatch_number == 5, "the wrong number");
    require(values[0] == 4.0F && values[2] == 2.0F, "the others were not left as they were");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(HostEngineMismatchTest, AnotherNumberForTheSameCallIsAMismatch) {
  TestMemory memory(2);
  const auto result = run_ranks_as_threads(2, [&](RankContext& context) {
    TestRank rank(context, memory);
    if (context.rank == 1) rank.skip_number();
    require_code(rank.barrier(), ErrorCode::kInvalidArgument);
    require(rank.progress().mismatch_number == (context.rank == 0 ? 2u : 1u), "the wrong number");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(HostEngineTimeoutTest, NamesTheFirstRankThatIsMissing) {
  TestMemory memory(4);
  const auto result = run_ranks_as_threads(4, [&](RankContext& context) {
    TestRank rank(context, memory);
    rank.barrier().value_or_throw();
    if (context.rank >= 2) return;
    rank.set_patience(std::chrono::milliseconds(50));
    require_code(rank.barrier(), ErrorCode::kTimeout);
    require(rank.progress().waiting_for() == 2, "the wrong rank");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(HostEngineTimeoutTest, NamesARankThatDiedAsAProcess) {
  TestMemory memory(3);
  const auto result = run_ranks_as_processes(3, [&](RankContext& context) {
    TestRank rank(context, memory);
    std::vector<std::byte> data(1 << 20);
    rank.all_reduce(data, data, kFloatSum).value_or_throw();
    if (context.rank == 1) return;  // rank 1 never enters the next operation
    rank.set_patience(std::chrono::milliseconds(50));
    require_code(rank.all_reduce(data, data, kFloatSum), ErrorCode::kTimeout);
    require(rank.progress().waiting_for() == 1, "the wrong rank");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(HostEngineInterruptTest, EndsAWaitThatSleeps) {
  TestMemory memory(2);
  const auto result = run_ranks_as_threads(2, [&](RankContext& context) {
    if (context.rank == 1) return;
    TestRank rank(context, memory);
    auto raiser = context.system.spawn("raiser", [&] {
      // The rank spins first. When it has stopped spinning, it publishes the rank for which it
      // waits.
      while (rank.progress().waiting_for() != 1) context.system.yield();
      rank.interrupt().raise();
    });
    require_code(rank.barrier(), ErrorCode::kAborted);
    raiser->join();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Rank 0 has reported rank 1 as lost and may reuse its memory. Rank 1, which is still alive and
// reads that memory, must get an error.
TEST(HostEngineLostRankTest, GetsNoResultFromMemoryThatItsPeersMayHaveUsedAgain) {
  TestMemory memory(2);
  memory.of(0).forget_holder(1);
  const auto result = run_ranks_as_threads(2, [&](RankContext& context) {
    TestRank rank(context, memory);
    std::vector<std::byte> in(4000);
    std::vector<std::byte> out(8000);
    const Status status = rank.all_gather(in, out);
    if (context.rank == 0) return status.value_or_throw();
    require_code(status, ErrorCode::kAborted);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
