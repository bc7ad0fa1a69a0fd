// Tests a rank that leaves an operation on symmetric memory with an error, and reuses its buffers
// at once. A peer that reads the buffers too late must not return OK, and no peer may write to
// them.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/host/arena.h"
#include "cadre/testing/core/equal_bytes.h"
#include "cadre/testing/core/forwarding_system.h"
#include "cadre/testing/core/host_engine_ranks.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/reference_reduction.h"
#include "cadre/testing/core/simulator_ranks.h"

namespace cadre {
namespace {

using sim::Fault;
using sim::SimOptions;
using sim::When;
using std::chrono::milliseconds;
using testing::RankContext;
using testing::require;

constexpr ReduceKind kFloatsAdded{DType::kFloat32, ReduceOp::kSum};
constexpr size_t kSliceBytes = 4 << 20;
constexpr std::byte kReused{0x5a};

// The words with which the two ranks of the first test synchronize.
struct Progress {
  std::atomic<uint32_t> is_reused{0};
  std::atomic<uint32_t> is_finished{0};
};

// A range of pages. The first access to a guarded page blocks until another rank has reused its own
// memory. So this process pauses in the middle of an operation, like a process that was stopped.
struct Guard {
  std::byte* begin = nullptr;
  size_t num_bytes = 0;
  Progress* progress = nullptr;
};
Guard guard;

void wait_in_the_middle(int, siginfo_t* info, void*) {
  auto* const at = static_cast<std::byte*>(info->si_addr);
  if (at < guard.begin || at >= guard.begin + guard.num_bytes) {
    ::signal(SIGSEGV, SIG_DFL);
    return;
  }
  while (guard.progress->is_reused.load() == 0) ::sched_yield();
  ::mprotect(guard.begin, guard.num_bytes, PROT_READ | PROT_WRITE);
}

void stand_still_at(Bytes pages, Progress& progress) {
  guard = {pages.data(), pages.size(), &progress};
  struct sigaction action {};
  action.sa_sigaction = wait_in_the_middle;
  action.sa_flags = SA_SIGINFO;
  require(::sigaction(SIGSEGV, &action, nullptr) == 0, "sigaction");
  require(::mprotect(pages.data(), pages.size(), PROT_NONE) == 0, "mprotect");
}

// Throws std::bad_alloc in the first wait in which a rank that leaves an operation waits for its
// peers, as a failed allocation at this point would.
class ThrowingSystem final : public testing::ForwardingSystem {
 public:
  ThrowingSystem(os::System& inner, const os::WaitWord& word)
      : ForwardingSystem(inner), word_(&word) {}

  bool wait_while(os::WaitWord& word, uint32_t old, Deadline deadline) override {
    if (&word == word_) {
      word_ = nullptr;
      throw std::bad_alloc();
    }
    return inner_.wait_while(word, old, deadline);
  }

 private:
  const os::WaitWord* word_;
};

// The way in which the operation ends on rank 0.
enum class Ending { kTimeout, kException };

class LateWriterTest : public ::testing::TestWithParam<Ending> {
 protected:
  // Runs the operation on rank 0, which must fail while rank 1 pauses in the middle of the
  // operation.
  static void fail(RankContext& context, const TestMemory& state, TestRank& rank) {
    const Bytes data = state.slice(context.rank);
    if (GetParam() == Ending::kException) {
      const std::string thrown =
          testing::failure_of([&] { (void)rank.all_reduce(data, data, kFloatsAdded); });
      return require(thrown.find("bad_alloc") != std::string::npos, "it did not throw: " + thrown);
    }
    rank.set_patience(milliseconds(100));
    const Status status = rank.all_reduce(data, data, kFloatsAdded);
    require(!status.ok() && status.error().code() == ErrorCode::kTimeout, "it did not time out");
  }
};

// Rank 0 gets its error while rank 1 pauses. It then overwrites three quarters of its memory and
// keeps the last quarter. Rank 1 continues after that, and must neither return OK nor change the
// memory of rank 0.
TEST_P(LateWriterTest, NeitherSucceedsNorChangesTheMemoryOfTheRankThatLeft) {
  TestMemory state(2, {.slice_bytes = kSliceBytes});
  const auto words = os::make_native_system()->create_segment(sizeof(Progress)).value_or_throw();
  auto& progress = *reinterpret_cast<Progress*>(words->bytes().data());
  const host::Arena arena = state.arena();
  const auto result = testing::run_ranks_as_processes(2, [&](RankContext& context) {
    const Bytes data = state.slice(context.rank);
    if (context.rank == 1) {
      TestRank rank(context, state);
      // The input of rank 1 is chosen so that its sums differ from what rank 0 has in its memory
      // after the error.
      std::ranges::fill(data, kReused);
      rank.barrier().value_or_throw();
      // Rank 1 reduces the second half and writes the sums into the buffers of both ranks. It
      // pauses at this page, in the middle of that half.
      stand_still_at(state.slice(0).subspan(kSliceBytes / 4 * 3, 4096), progress);
      const Status status = rank.all_reduce(data, data, kFloatsAdded);
      progress.is_finished.store(1);
      require(!status.ok(), "it returned OK");
      require(status.error().code() == ErrorCode::kAborted, status.error().message());
      return;
    }
    ThrowingSystem throwing(context.system, arena.step_flag(1).step);
    RankContext thrown{throwing, context.rank, context.world_size, {}, {}};
    TestRank rank(GetParam() == Ending::kException ? thrown : context, state);
    rank.barrier().value_or_throw();
    fail(context, state, rank);
    std::ranges::fill(data.first(kSliceBytes / 4 * 3), kReused);
    const std::vector<std::byte> kept(data.begin(), data.end());
    progress.is_reused.store(1);
    while (progress.is_finished.load() == 0) context.system.yield();
    require(testing::equal_bytes(data, kept), "its memory was changed");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

INSTANTIATE_TEST_SUITE_P(All, LateWriterTest,
                         ::testing::Values(Ending::kTimeout, Ending::kException),
                         [](const auto& test) {
                           return test.param == Ending::kTimeout ? "Timeout" : "Exception";
                         });

// Rank 1 pauses for longer than rank 0 waits, at each point of the operation in turn. No rank may
// return OK with a wrong sum.
TEST(HostEngineLeavingTest, NobodySucceedsWithMemoryThatItsOwnerUsesAgain) {
  constexpr int kNumRanks = 3;
  const testing::Inputs inputs = testing::random_inputs(kNumRanks, 20'000, DType::kFloat32, 5);
  const std::vector<std::byte> sum = testing::reference_reduction(inputs, kFloatsAdded);
  int num_left = 0;
  for (int64_t run = 0; run < 60; ++run) {
    const int64_t point = 1 + run % 12;
    TestMemory state(kNumRanks, {.slice_bytes = kSliceBytes});
    const SimOptions options{
        .faults = {Fault::stop(1, When::at_point(1, point)).lasting(milliseconds(500))}};
    const auto result = testing::run_ranks_in_simulator(
        static_cast<uint64_t>(run), options, kNumRanks, [&](RankContext& context) {
          TestRank rank(context, state);
          rank.set_patience(context.rank == 0 ? milliseconds(50) : milliseconds(5000));
          const auto& own = inputs[static_cast<size_t>(context.rank.value)];
          const Bytes data = state.slice(context.rank).first(own.size());
          std::ranges::copy(own, data.begin());
          const Status status = rank.all_reduce(data, data, kFloatsAdded);
          if (status.ok()) require(testing::equal_bytes(data, sum), "OK with a wrong sum");
          if (context.rank == 0 && !status.ok()) {
            context.output = "left";
            std::ranges::fill(data, kReused);
          }
        });
    if (result.ranks[0].output == "left") ++num_left;
    // Rank 1 may have fewer points than `point`.
    EXPECT_TRUE(testing::RanksResult{result.ranks}.ok())
        << "stopped at point " << point << ", seed " << run << "\n"
        << result.failures();
  }
  EXPECT_GT(num_left, 5);
}

}  // namespace
}  // namespace cadre
