// Tests failures of groups that use NCCL, with the fake NCCL on the late device: a call that does
// not end is aborted, every rank gets an error that names the cause, and no memory is given back
// while the device may use it.
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/core/own_process.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/fake_nccl/fake_nccl.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "cadre/train/checkpoint/snapshot_parts.h"
#include "cadre/train/checkpoint/snapshot_saver.h"
#include "on_devices.h"

namespace cadre {
namespace {

namespace fake_nccl = testing::fake_nccl;
namespace late = testing::late;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using testing::DeviceEngine;
using ::testing::Each;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using torch::Tensor;

Tensor ones(const c10::Device& device, int64_t numel = 100) {
  return torch::ones({numel}, at::device(device));
}

// Waits on the host until the work has ended on the device, and throws its error.
void await_end(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  while (!work.is_completed()) {
    require(std::chrono::steady_clock::now() - begin < seconds(15), "the work ends");
    std::this_thread::sleep_for(milliseconds(1));
  }
  if (const auto error = work.error()) throw Error(*error);
}

class NcclFailureTest : public testing::OnDevices {
 protected:
  void TearDown() override {
    OnDevices::TearDown();
    fake_nccl::set_faults({});
    EXPECT_EQ(fake_nccl::first_misuse(), "");
    EXPECT_EQ(fake_nccl::counts().communicators, 0);
    EXPECT_EQ(fake_nccl::counts().open_groups, 0);
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, NcclFailureTest, ::testing::Values(DeviceEngine::kNccl),
                         [](const auto& test) { return testing::name_of(test.param); });

TEST_P(NcclFailureTest, ACallThatOneRankDoesNotMakeEndsAtItsDeadline) {
  const std::vector<std::string> failures =
      failures_of(2, [](const ProcessGroup& group, const c10::Device& device) {
        if (group.rank() == 1) {
          std::this_thread::sleep_for(seconds(3));
          group.all_reduce(ones(device));
          return;
        }
        await_end(group.all_reduce_async(ones(device), {.timeout = milliseconds(300)}));
      });
  EXPECT_THAT(failures[0],
              AllOf(HasSubstr("kTimeout: all_reduce #1"), HasSubstr("waiting for rank 1")));
  EXPECT_THAT(failures[1], AllOf(HasSubstr("kAborted"), HasSubstr("first failure: all_reduce #1")));
}

TEST_P(NcclFailureTest, AbortEndsACallThatWaitsOnTheDevice) {
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<std::string> failures =
      failures_of(2, [](const ProcessGroup& group, const c10::Device& device) {
        if (group.rank() == 1) {
          std::this_thread::sleep_for(milliseconds(100));
          group.communicator().abort("the test ends it");
        }
        await_end(group.all_reduce_async(ones(device)));
      });
  EXPECT_THAT(failures, Each(HasSubstr("the test ends it")));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(5));
}

TEST_P(NcclFailureTest, AnErrorThatNcclReportsLaterNamesIt) {
  fake_nccl::load();
  fake_nccl::set_faults({.call_fails_on = 1});
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<std::string> failures =
      failures_of(3, [](const ProcessGroup& group, const c10::Device& device) {
        await_end(group.all_reduce_async(ones(device)));
      });
  EXPECT_THAT(failures[1],
              AllOf(HasSubstr("kInternal: all_reduce #1"),
                    HasSubstr("NCCL 2.20.0 reports: internal error (the test wants it)")));
  for (const int rank : {0, 2}) {
    EXPECT_THAT(failures[static_cast<size_t>(rank)],
                AllOf(HasSubstr("kAborted"), HasSubstr("on rank 1"), HasSubstr("internal error")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(5));
}

// The stream passes the call when it is aborted, so what is copied behind it is not its result.
TEST_P(NcclFailureTest, ASnapshotOfWhatAFailedCallHasWrittenFails) {
  fake_nccl::load();
  fake_nccl::set_faults({.call_fails_on = 1});
  const testing::TemporaryFolder run;
  const std::vector<std::string> failures =
      failures_of(2, [&](const ProcessGroup& group, const c10::Device& device) {
        torch::nn::Linear net(4, 3);
        net->to(device);
        SnapshotSaver saver(SnapshotFolder(run.path()), group);
        group.all_reduce(net->weight.detach());
        saver.save(1, parts_of(*net));
        saver.finish();
      });
  EXPECT_THAT(failures, Each(AllOf(HasSubstr("saved in the background"),
                                   HasSubstr("internal error (the test wants it)"))));
  EXPECT_TRUE(SnapshotFolder(run.path()).steps().empty());
}

// NCCL counts the groups of each thread, so a group in which a call fails is ended, too.
TEST_P(NcclFailureTest, CallsThatNcclRefusesFailTheGroup) {
  for (const fake_nccl::Faults& faults :
       {fake_nccl::Faults{.call_is_refused_on = 0}, {.group_is_refused_on = 0}}) {
    fake_nccl::set_faults(faults);
    const std::vector<std::string> failures =
        failures_of(2, [](const ProcessGroup& group, const c10::Device& device) {
          await_end(group.all_reduce_async(ones(device)));
        });
    EXPECT_THAT(failures[0], AllOf(HasSubstr("kInternal"), HasSubstr("NCCL 2.20.0 reports")));
    EXPECT_THAT(failures[1], HasSubstr("first failure: all_reduce #1"));
  }
}

// The error is known at the call, so the program must not go on with a tensor that is not reduced.
TEST_P(NcclFailureTest, ABlockingCallThatNcclRefusesThrows) {
  fake_nccl::set_faults({.group_is_refused_on = 0});
  const std::vector<std::string> failures =
      failures_of(2, [](const ProcessGroup& group, const c10::Device& device) {
        if (group.rank() == 0) return group.all_reduce(ones(device));
        await_end(group.all_reduce_async(ones(device)));
      });
  EXPECT_THAT(failures[0], AllOf(HasSubstr("kInternal"), HasSubstr("NCCL 2.20.0 reports")));
  EXPECT_THAT(failures[1], HasSubstr("first failure: all_reduce #1"));
}

// An exception must not end the process, and no call may be left without an end.
TEST_P(NcclFailureTest, AnExceptionOfTheWatchThreadFailsTheGroup) {
  fake_nccl::load();
  fake_nccl::set_faults({.call_hangs_on = 1, .state_throws_on = 1});
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<std::string> failures =
      failures_of(2, [](const ProcessGroup& group, const c10::Device& device) {
        await_end(group.all_reduce_async(ones(device)));
      });
  EXPECT_THAT(failures[1],
              AllOf(HasSubstr("kInternal: all_reduce #1"),
                    HasSubstr("the thread that watches the calls of NCCL has failed: the test "
                              "wants an exception")));
  EXPECT_THAT(failures[0], HasSubstr("first failure: all_reduce #1"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(5));
}

// A thread of NCCL may wait for a peer when a communicator is aborted or destroyed.
TEST_P(NcclFailureTest, AnAbortThatNeverEndsDoesNotKeepTheCaller) {
  for (const bool fails : {true, false}) {
    fake_nccl::load();
    fake_nccl::set_faults({.end_hangs_on = 1});
    const auto lines = std::make_shared<testing::LogLines>();
    std::vector<std::string> failures(2);
    const auto begin = std::chrono::steady_clock::now();
    const auto result = testing::run_ranks_as_threads(2, [&](testing::RankContext& context) {
      CommunicatorOptions options{.timeout = testing::kRankTimeout, .log = lines};
      options.device_backend = testing::device_backend_of(GetParam(), context.rank, nullptr);
      const c10::Device device = late::device(context.rank);
      const ProcessGroup group(testing::connect_ranks(context, options));
      const Work work = group.all_reduce_async(ones(device));
      work.wait();
      await_end(work);
      if (fails && context.rank == 0) group.abort("the test ends it");
      if (fails) {
        failures[static_cast<size_t>(context.rank.value)] =
            failure_of([&] { group.all_reduce(ones(device)); });
      }
      group.close();
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(9));
    const std::string end = fails ? "ncclCommAbort" : "ncclCommDestroy";
    EXPECT_THAT(lines->get(), ::testing::Contains(
                                  HasSubstr("group=world rank=1 communicator=abandoned: " + end)));
    fake_nccl::set_faults({});
    while (fake_nccl::counts().communicators > 0) std::this_thread::sleep_for(milliseconds(1));
  }
}

// Kernels of other ranks may wait for the communicator of a rank that has none.
TEST_P(NcclFailureTest, AnIdleCommunicatorIsAbortedWhenTheGroupFails) {
  const uint64_t num_before = fake_nccl::counts().aborts;
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    await_end(group.all_reduce_async(ones(device)));
    group.barrier();
    if (group.rank() == 0) group.abort("the test ends it");
    const auto begin = std::chrono::steady_clock::now();
    while (fake_nccl::counts().aborts < num_before + 2) {
      require(std::chrono::steady_clock::now() - begin < seconds(5), "both are aborted");
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
}

TEST_P(NcclFailureTest, AKernelThatNeverEndsIsAbortedAtTheDeadline) {
  fake_nccl::load();
  fake_nccl::set_faults({.call_hangs_on = 1});
  const std::vector<std::string> failures =
      failures_of(2, [](const ProcessGroup& group, const c10::Device& device) {
        await_end(group.all_reduce_async(ones(device), {.timeout = milliseconds(500)}));
      });
  for (const std::string& failure : failures) EXPECT_THAT(failure, HasSubstr("all_reduce #1"));
}

TEST_P(NcclFailureTest, CallsThatDifferAreNamedOnAllRanks) {
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<std::string> failures =
      failures_of(3, [](const ProcessGroup& group, const c10::Device& device) {
        const Tensor first = ones(device);
        group.all_reduce(first);
        await_end(group.all_reduce_async(ones(device, group.rank() == 2 ? 8 : 4)));
      });
  for (const std::string& failure : failures) {
    EXPECT_THAT(failure,
                AllOf(HasSubstr("kInvalidArgument: all_reduce #2"), HasSubstr("the ranks disagree"),
                      HasSubstr("all_reduce(sum, float32 x 4, on the device)"),
                      HasSubstr("all_reduce(sum, float32 x 8, on the device)"),
                      HasSubstr("tensors of one shape")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(8));
}

TEST_P(NcclFailureTest, MemoryOfTheCpuOnOneRankIsNamedOnAllRanks) {
  const std::vector<std::string> failures =
      failures_of(2, [](const ProcessGroup& group, const c10::Device& device) {
        const c10::Device own = group.rank() == 0 ? c10::Device(at::kCPU) : device;
        await_end(group.all_reduce_async(torch::ones({4}, at::device(own))));
      });
  EXPECT_THAT(failures, Each(AllOf(HasSubstr("kInvalidArgument"), HasSubstr("on the device"))));
}

// The other rank waits in a call when this one destroys its group.
TEST_P(NcclFailureTest, AGroupThatIsDestroyedWithACallPendingEnds) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::string> failures(2);
  const auto result = testing::run_ranks_as_threads(2, [&](testing::RankContext& context) {
    CommunicatorOptions options{.timeout = testing::kRankTimeout};
    options.device_backend = testing::device_backend_of(GetParam(), context.rank, nullptr);
    const c10::Device device = late::device(context.rank);
    auto group = std::make_optional<ProcessGroup>(testing::connect_ranks(context, options));
    std::optional<Work> work;
    if (context.rank == 0) work = group->all_reduce_async(ones(device));
    if (context.rank == 0) std::this_thread::sleep_for(milliseconds(100));
    if (context.rank == 1) {
      std::this_thread::sleep_for(milliseconds(50));
      work = group->broadcast_async(ones(device), {.root = 0});
    }
    group.reset();
    failures[static_cast<size_t>(context.rank.value)] = failure_of([&] { await_end(*work); });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const std::string& failure : failures) EXPECT_THAT(failure, HasSubstr("kAborted"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(10));
}

// NCCL's kernel cannot begin, because the caller's own kernels before it do not end. So the abort
// has no effect on the device, which may still use the memory.
TEST_P(NcclFailureTest, MemoryThatTheDeviceMayStillUseIsNotGivenBack) {
  std::vector<std::unique_ptr<late::StreamHold>> holds(2);
  std::vector<const void*> addresses(2);
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<std::string> failures =
      failures_of(2, [&](const ProcessGroup& group, const c10::Device& device) {
        const auto rank = static_cast<size_t>(group.rank());
        const c10::Stream held = pooled(device);
        holds[rank] = std::make_unique<late::StreamHold>(held);
        std::optional<Work> work;
        {
          const c10::StreamGuard guard(held);
          const Tensor tensor = torch::empty({3000}, at::device(device));
          addresses[rank] = tensor.const_data_ptr();
          work = group.all_reduce_async(tensor, {.timeout = milliseconds(200)});
        }
        const std::string failure = failure_of([&] { await_end(*work); });
        const c10::StreamGuard guard(held);
        const Tensor next = torch::empty({3000}, at::device(device));
        require(next.const_data_ptr() != addresses[rank], "the memory is not given out again");
        throw Error(ErrorCode::kInternal, failure);
      });
  EXPECT_THAT(failures, Each(AllOf(HasSubstr("engine \"nccl\" has not ended this operation"),
                                   HasSubstr("end the process"))));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, seconds(3));
  for (const auto& hold : holds) hold->release();
  late::synchronize_all();
}

// The ranks are processes whose calls on the device never end.
TEST(NcclProcessTest, DISABLED_AKilledRankIsNamed) {
  const auto result = testing::run_job({.world_size = 2}, [](testing::RankContext& context,
                                                             const Membership& membership) {
    fake_nccl::load();
    fake_nccl::set_faults({.is_alone = true});
    CommunicatorOptions options{.timeout = testing::kRankTimeout};
    options.device_backend = testing::device_backend_of(DeviceEngine::kNccl, context.rank, nullptr);
    const ProcessGroup group(testing::connect(context, membership, options));
    const Work work = group.all_reduce_async(ones(late::device(context.rank)));
    group.barrier();
    if (context.rank == 1) raise(SIGKILL);
    const auto begin = std::chrono::steady_clock::now();
    context.output = failure_of([&] { await_end(work); });
    require(std::chrono::steady_clock::now() - begin < seconds(5), context.output);
  });
  EXPECT_EQ(result.ranks[0].failure, "");
  EXPECT_THAT(result.ranks[0].output, AllOf(HasSubstr("kPeerLost: all_reduce #1"),
                                            HasSubstr("rank 1"), HasSubstr("is gone")));
}

// A process that is forked after the device was registered has no streams, so the ranks are forked
// by a process that has not registered it.
TEST(NcclProcessTest, AKilledRankIsNamed) {
  EXPECT_EQ(testing::run_disabled_test("NcclProcessTest.DISABLED_AKilledRankIsNamed", {}), "");
}

}  // namespace
}  // namespace cadre
