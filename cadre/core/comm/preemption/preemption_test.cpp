// Tests how ranks agree to leave, on threads. Each rank watches a signal of its own, so that one
// signal reaches one rank. Signals to processes: cadre/launch/cli/run_preemption_test.cpp.
#include "cadre/core/comm/preemption/preemption.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>

#include <array>
#include <atomic>
#include <string>
#include <vector>

#include "cadre/core/comm/groups/split.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/wire/preemption_file.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/core/thread_groups.h"

namespace cadre {
namespace {

constexpr std::array kSignalOfRank{SIGUSR1, SIGUSR2, SIGTERM, SIGALRM};

PreemptionOptions signal_of(int rank) {
  return {.signals = {kSignalOfRank[static_cast<size_t>(rank)]}};
}

class PreemptionTest : public GroupsTest {
 protected:
  // A Preemption that was asked keeps its handlers, which other tests of this process must not
  // have.
  ~PreemptionTest() override {
    for (const int number : kSignalOfRank) ::signal(number, SIG_DFL);
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, PreemptionTest,
                         ::testing::Values(TransportChoice::kSharedMemory, TransportChoice::kTcp),
                         name_of_transport);

// The signal arrives at one rank between two of its steps. All ranks must leave after the step in
// which that rank asks next, or after the step before the last one of the loop.
TEST_P(PreemptionTest, AllRanksLeaveAfterTheStepThatFollowsTheSignal) {
  for (int world_size = 1; world_size <= 4; ++world_size) {
    for (int target = 0; target < world_size; ++target) {
      const int signal_step = 3 + 2 * target;
      run(world_size, [&](RankContext& context, Communicator& group) {
        Preemption preemption(signal_of(context.rank));
        group.barrier();  // no signal comes before all ranks handle it
        int left_at = 0;
        for (int step = 1; left_at == 0 && step <= 50; ++step) {
          if (step == signal_step && context.rank == target)
            ::kill(::getpid(), kSignalOfRank[static_cast<size_t>(target)]);
          if (step == signal_step && context.rank == target) {
            await(context, "the signal", [&] { return preemption.is_requested(); });
          }
          if (preemption.must_leave(group)) left_at = step;
        }
        require(left_at == signal_step + 1, format("left at step {}", left_at));
        const uint64_t num_before = group.num_collectives();
        require(preemption.must_leave(group), "the decision is final");
        require(group.num_collectives() == num_before, "a decided rank does not communicate");
        require(preemption.is_requested() == (context.rank == target), "is_requested() is local");
        group.barrier();
      });
    }
  }
}

TEST_P(PreemptionTest, WithoutASignalNoRankLeavesAndEachStepHasOneCollective) {
  run(3, [](RankContext& context, Communicator& group) {
    Preemption preemption(signal_of(context.rank));
    const uint64_t before = group.num_collectives();
    for (int step = 0; step < 20; ++step) require(!preemption.must_leave(group), "no signal");
    require(group.num_collectives() == before + 20, "one collective for each step");
  });
}

// A signal of which the ranks have agreed in one group holds in the next one, too.
TEST_P(PreemptionTest, AnotherGroupAgreesAnew) {
  run(2, [](RankContext& context, Communicator& world) {
    Preemption preemption(signal_of(context.rank));
    world.barrier();
    require(!preemption.must_leave(world), "the first call is false");
    const auto next = split(world, {.color = 0, .key = context.rank}, soon(context));
    if (context.rank == 1) ::kill(::getpid(), kSignalOfRank[1]);
    if (context.rank == 1) {
      await(context, "the signal", [&] { return preemption.is_requested(); });
    }
    require(!preemption.must_leave(*next), "the first call in a group is false");
    require(preemption.must_leave(*next), "the second one knows the signal");
    next->close(soon(context));
  });
}

// A group often gets the address of the one that was destroyed before.
TEST_P(PreemptionTest, EachOfSeveralGroupsAgreesAnew) {
  run(2, [](RankContext& context, Communicator& world) {
    Preemption preemption(signal_of(context.rank));
    world.barrier();
    if (context.rank == 1) ::kill(::getpid(), kSignalOfRank[1]);
    if (context.rank == 1) {
      await(context, "the signal", [&] { return preemption.is_requested(); });
    }
    for (int i = 0; i < 10; ++i) {
      const auto next = split(world, {.color = 0, .key = context.rank}, soon(context));
      require(!preemption.must_leave(*next), "the first call in a group is false");
      require(preemption.must_leave(*next), "the second one knows the signal");
      next->close(soon(context));
    }
  });
}

// An all_reduce is pending when the last step is over. close() must not abort it.
TEST_P(PreemptionTest, ARankThatClosesFirstWaitsForTheLastCallOfTheOthers) {
  std::atomic<bool> is_closing = false;
  run(2, [&](RankContext& context, Communicator& group) {
    Preemption preemption(signal_of(context.rank));
    require(!preemption.must_leave(group), "no signal");
    if (context.rank == 1) {
      await(context, "the close of rank 0", [&] { return is_closing.load(); });
      context.system.poll({}, context.system.deadline_in(milliseconds(20)));
    }
    require(!preemption.must_leave(group), "no signal");
    if (context.rank == 0) is_closing = true;
  });
}

TEST_P(PreemptionTest, ThrowsTheFailureOfTheGroup) {
  run(2, [](RankContext& context, Communicator& group) {
    Preemption preemption(signal_of(context.rank));
    require(!preemption.must_leave(group), "no signal");
    if (context.rank == 1) return group.abort("no more steps");
    try {
      for (int step = 0; step < 1000; ++step) preemption.must_leave(group);
      require(false, "the group was aborted");
    } catch (const Error& error) {
      require(error.code() == ErrorCode::kAborted, error.message());
    }
  });
}

class PreemptionFileTest : public ::testing::Test {
 protected:
  PreemptionFileTest() { ::setenv("TORCHELASTIC_ERROR_FILE", error_file_.c_str(), 1); }
  ~PreemptionFileTest() override { ::unsetenv("TORCHELASTIC_ERROR_FILE"); }

  std::optional<PreemptionFile> left() const {
    const auto text = os::read_file(error_file_ + std::string(kPreemptionFileSuffix), 1000);
    return text.ok() ? parse_preemption_file(*text) : std::nullopt;
  }

  testing::TemporaryFolder folder_;
  const std::string error_file_ = folder_.file("error.json");
};

TEST_F(PreemptionFileTest, TellsTheLauncherThatItHasAskedAndWhatItHasSaved) {
  struct sigaction before = {};
  ::sigaction(SIGUSR1, nullptr, &before);
  {
    Preemption preemption({.signals = {SIGUSR1}, .exit_code = 99});
    EXPECT_FALSE(preemption.is_requested());
    EXPECT_EQ(left(), std::nullopt);
    ::raise(SIGUSR1);
    EXPECT_TRUE(preemption.is_requested());
    EXPECT_EQ(left(), PreemptionFile());
    EXPECT_EQ(preemption.leave(12), 99);
    EXPECT_EQ(left(), (PreemptionFile{.saved_step = 12, .exit_code = 99}));
  }
  ::raise(SIGUSR1);  // has no effect on a process that leaves
  ::sigaction(SIGUSR1, &before, nullptr);
}

// Slurm sends a signal to the launcher, which forwards it, and to the workers.
TEST_F(PreemptionFileTest, ASecondSignalDoesNotEndAProgramThatHasFinished) {
  struct sigaction before = {};
  ::sigaction(SIGUSR1, nullptr, &before);
  {
    const Preemption preemption({.signals = {SIGUSR1}});
    ::raise(SIGUSR1);
  }
  ::raise(SIGUSR1);
  ::sigaction(SIGUSR1, &before, nullptr);
}

TEST(PreemptionOptionsTest, ASignalThatCannotBeHandledIsRefused) {
  for (const int number : {0, -1, 100, SIGKILL, SIGSEGV}) {
    EXPECT_THROW(Preemption({.signals = {SIGTERM, number}}), Error) << number;
  }
}

TEST(PreemptionOptionsTest, AnExitCodeThatIsNoneIsRefused) {
  EXPECT_EQ(Preemption().leave(1), 75);
  for (const int code : {0, -1, 256}) {
    EXPECT_THROW(Preemption({.exit_code = code}), Error) << code;
  }
}

}  // namespace
}  // namespace cadre
