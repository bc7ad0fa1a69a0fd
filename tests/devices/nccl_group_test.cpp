// Tests groups that use NCCL, with the fake NCCL on the late device: how it is called, what it
// computes, and which engine a group gets.
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/log.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/fake_nccl/fake_nccl.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "on_devices.h"

namespace cadre {
namespace {

namespace fake_nccl = testing::fake_nccl;
namespace late = testing::late;
using ::testing::AllOf;
using testing::DeviceEngine;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using torch::Tensor;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Collects the lines of all ranks.
class Lines final : public LogSink {
 public:
  void write(LogLevel /*level*/, std::string_view /*component*/,
             std::string_view message) override {
    const std::lock_guard lock(mutex_);
    text_ += std::string(message) + "\n";
  }
  std::string text() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

// Returns the part of a failure to connect that is equal on all ranks.
std::string cause_of(const std::string& failure) {
  const size_t begin = failure.find("round 0: ");
  return begin == std::string::npos ? failure : failure.substr(begin);
}

// After each test every communicator is destroyed, and NCCL was not misused.
class NcclGroupTest : public testing::OnDevices {
 protected:
  void TearDown() override {
    OnDevices::TearDown();
    EXPECT_EQ(fake_nccl::first_misuse(), "");
    EXPECT_EQ(fake_nccl::counts().communicators, 0);
    EXPECT_EQ(fake_nccl::counts().operations, 0);
    fake_nccl::set_faults({});
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, NcclGroupTest, ::testing::Values(DeviceEngine::kNccl),
                         [](const auto& test) { return testing::name_of(test.param); });

TEST_P(NcclGroupTest, ACallIsOneGroup) {
  fake_nccl::load();
  const fake_nccl::Counts before = fake_nccl::counts();
  expect_on_all(3, [](const ProcessGroup& group, const c10::Device& device) {
    const Tensor one = torch::full({4}, group.rank() + 1.0, at::device(device));
    const Tensor two = torch::full({2, 3}, group.rank() + 10.0, at::device(device));
    group.all_reduce_coalesced({one, two});
    require(torch::all(one.cpu() == 6).item<bool>(), "the first sum");
    require(torch::all(two.cpu() == 33).item<bool>(), "the second sum");
  });
  const fake_nccl::Counts after = fake_nccl::counts();
  EXPECT_EQ(after.groups - before.groups, 3);
  EXPECT_EQ(after.collectives - before.collectives, 6);
  EXPECT_EQ(after.aborts, before.aborts);
}

// NCCL enqueues the kernels later, when its connections are made.
TEST_P(NcclGroupTest, WaitsUntilNcclHasEnqueuedACall) {
  fake_nccl::load();
  fake_nccl::set_faults({.progress_us = 30'000});
  expect_on_all(2, [](const ProcessGroup& group, const c10::Device& device) {
    for (int round = 1; round <= 3; ++round) {
      const Tensor tensor = torch::full({100}, round * (group.rank() + 1.0), at::device(device));
      group.all_reduce(tensor);
      require(torch::all(tensor.clone().cpu() == 3 * round).item<bool>(), "the sum");
    }
  });
}

// NCCL's maximum and minimum ignore a NaN.
TEST_P(NcclGroupTest, MaximumAndMinimumKeepNan) {
  for (const at::ScalarType type :
       {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
    expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
      const auto own = [&] {
        return (group.rank() == 0 ? torch::tensor({1.0, kNan, 3.0, -4.0})
                                  : torch::tensor({2.0, 7.0, kNan, -5.0}))
            .to(type);
      };
      for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
        const Tensor expected = own();
        const Tensor found = own().to(device);
        group.all_reduce(expected, {.op = op});
        group.all_reduce(found, {.op = op});
        require(torch::allclose(found.cpu(), expected, 0, 0, /*equal_nan=*/true), "all_reduce");
        Tensor part = torch::empty({2}, found.options());
        Tensor expected_part = torch::empty({2}, expected.options());
        group.reduce_scatter(part, own().to(device), {.op = op});
        group.reduce_scatter(expected_part, own(), {.op = op});
        require(torch::allclose(part.cpu(), expected_part, 0, 0, true), "reduce_scatter");
      }
    });
  }
}

TEST_P(NcclGroupTest, PremultipliedSumsHaveTheBitsOfTheCpu) {
  for (const at::ScalarType type :
       {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
    expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
      const Tensor input = torch::sin(torch::arange(50, torch::kDouble) + group.rank()).to(type);
      const Reduction reduction = Reduction::premul_sum(1.0 / (3 + group.rank()));
      const Tensor expected = input.clone();
      group.all_reduce(expected, {.op = reduction});
      const Tensor found = input.to(device);
      group.all_reduce(found, {.op = reduction});
      require(torch::equal(found.cpu(), expected), "two ranks add once, so the bits are equal");
    });
  }
}

// NCCL multiplies each input by 1 / 3, which would be inexact.
TEST_P(NcclGroupTest, AveragesOfThreeRanksAreExact) {
  for (const at::ScalarType type :
       {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
    expect_on_all(3, [&](const ProcessGroup& group, const c10::Device& device) {
      const Tensor tensor = ((torch::arange(60) % 20 + 1) * (group.rank() + 1)).to(device, type);
      group.all_reduce(tensor, {.op = ReduceOp::kAvg});
      require(torch::equal(tensor.cpu(), ((torch::arange(60) % 20 + 1) * 2).to(type)), "the mean");
      const Tensor large = torch::full({3}, 30000, at::device(device).dtype(type));
      group.all_reduce(large, {.op = ReduceOp::kAvg});
      const Tensor part = torch::empty({1}, large.options());
      group.reduce_scatter(part, large, {.op = ReduceOp::kAvg});
      require(torch::equal(part.cpu(), torch::full({1}, 30000, type)), "the mean of large values");
    });
  }
}

TEST_P(NcclGroupTest, RefusesWhatNcclDoesNotCompute) {
  expect_on_all(2, [](const ProcessGroup& group, const c10::Device& device) {
    const auto refusal = [&](at::ScalarType type, ReduceOp op) {
      const Tensor tensor = torch::ones({2}, at::device(device).dtype(type));
      return failure_of([&] { group.all_reduce(tensor, {.op = op}); });
    };
    require(refusal(torch::kInt, ReduceOp::kBand).find("does not compute band of int32") !=
                std::string::npos,
            refusal(torch::kInt, ReduceOp::kBand));
    require(refusal(torch::kShort, ReduceOp::kSum).find("does not compute sum of int16") !=
                std::string::npos,
            refusal(torch::kShort, ReduceOp::kSum));
    require(group.communicator().num_collectives() == 0, "no call got a number");
  });
}

TEST_P(NcclGroupTest, TwoGroupsWorkAtOnce) {
  late::set_delays({.longest = std::chrono::microseconds(300), .seed = 3});
  expect_on_all(4, [](const ProcessGroup& group, const c10::Device& device) {
    const ProcessGroup half = *group.split({.color = group.rank() % 2, .key = group.rank()});
    for (int round = 1; round <= 10; ++round) {
      const Tensor of_all = torch::full({50}, group.rank() * round + 1.0, at::device(device));
      const Tensor of_half = torch::full({50}, group.rank() * round + 1.0, at::device(device));
      const Work all = group.all_reduce_async(of_all);
      const Work own = half.all_reduce_async(of_half);
      own.wait();
      all.wait();
      require(torch::all(of_all.cpu() == 6 * round + 4).item<bool>(), "the sum of all");
      const int others = group.rank() % 2 == 0 ? 2 : 4;
      require(torch::all(of_half.cpu() == others * round + 2).item<bool>(), "the sum of the half");
    }
    half.close();
  });
}

// The temporary tensors of all calls are allocated before the first call runs on the device.
TEST_P(NcclGroupTest, TemporaryTensorsOfSeveralCallsAreApart) {
  expect_on_all(2, [](const ProcessGroup& group, const c10::Device& device) {
    const c10::Stream held = pooled(device);
    late::StreamHold hold(held);
    std::vector<Tensor> results;
    for (int i = 0; i < 3; ++i) {
      const c10::StreamGuard guard(held);
      const Tensor half =
          torch::full({500}, i + group.rank() + 1.0, at::device(device).dtype(torch::kHalf));
      group.all_reduce(half, {.op = Reduction::premul_sum(0.5)});
      const Tensor largest = torch::full({500}, i + group.rank() + 1.0, at::device(device));
      group.all_reduce(largest, {.op = ReduceOp::kMax});
      results.push_back(half);
      results.push_back(largest);
    }
    hold.release();
    late::synchronize_all();
    for (int i = 0; i < 3; ++i) {
      const auto at = [&](int index) { return results[static_cast<size_t>(2 * i + index)].cpu(); };
      require(torch::all(at(0) == i + 1.5).item<bool>(), format("premul {}", i));
      require(torch::all(at(1) == i + 2).item<bool>(), format("max {}", i));
    }
  });
}

class EngineChoiceTest : public NcclGroupTest {
 protected:
  struct Choice {
    DeviceEngineChoice choice = DeviceEngineChoice::kAuto;
    NcclOptions nccl = {};
    int device = 0;
  };
  // Connects two ranks with these choices, and returns their failures.
  std::vector<std::string> connect(const std::vector<Choice>& choices,
                                   const std::shared_ptr<Lines>& lines) {
    std::vector<std::string> failures(choices.size());
    const auto result =
        testing::run_ranks_as_threads(static_cast<int>(choices.size()), [&](auto& context) {
          const auto& own = choices[static_cast<size_t>(context.rank.value)];
          CommunicatorOptions options{.timeout = testing::kRankTimeout};
          options.log = lines;
          options.device_backend = {.device = *device::to_core(late::device(own.device)),
                                    .make = device_engine(own.choice, own.nccl)};
          failures[static_cast<size_t>(context.rank.value)] = failure_of([&] {
            const ProcessGroup group(testing::connect_ranks(context, options));
            const Tensor tensor =
                torch::full({10}, context.rank + 1.0, at::device(late::device(own.device)));
            group.all_reduce(tensor);
            require(torch::all(tensor.cpu() == 3).item<bool>(), "the sum");
            group.close();
          });
        });
    EXPECT_TRUE(result.ok()) << result.failures();
    return failures;
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, EngineChoiceTest, ::testing::Values(DeviceEngine::kNccl),
                         [](const auto& test) { return testing::name_of(test.param); });

TEST_P(EngineChoiceTest, TakesNcclWhereEveryRankHasADeviceOfItsOwn) {
  const auto lines = std::make_shared<Lines>();
  const NcclOptions nccl = testing::fake_nccl_options();
  EXPECT_THAT(connect({{.nccl = nccl, .device = 0}, {.nccl = nccl, .device = 1}}, lines),
              ::testing::Each(""));
  EXPECT_THAT(lines->text(), AllOf(HasSubstr("device_engine=nccl reason=\"NCCL 2.20.0\""),
                                   HasSubstr("+nccl device=")));
}

TEST_P(EngineChoiceTest, CopiesWhereOneRankHasNoNccl) {
  const auto lines = std::make_shared<Lines>();
  NcclOptions absent = testing::fake_nccl_options();
  absent.library = "/no/such/libnccl.so";
  EXPECT_THAT(
      connect({{.nccl = testing::fake_nccl_options(), .device = 0}, {.nccl = absent, .device = 1}},
              lines),
      ::testing::Each(""));
  EXPECT_THAT(lines->text(),
              AllOf(HasSubstr("device_engine=staged reason=\"rank 1: NCCL cannot be used: "),
                    HasSubstr("/no/such/libnccl.so"), HasSubstr("+staged device=")));
}

TEST_P(EngineChoiceTest, CopiesWhereTwoRanksShareADevice) {
  const auto lines = std::make_shared<Lines>();
  const NcclOptions nccl = testing::fake_nccl_options();
  EXPECT_THAT(connect({{.nccl = nccl, .device = 2}, {.nccl = nccl, .device = 2}}, lines),
              ::testing::Each(""));
  EXPECT_THAT(lines->text(), HasSubstr("ranks 0 and 1 share the device"));
}

TEST_P(EngineChoiceTest, DifferentChoicesAreTheSameErrorOnAllRanks) {
  const NcclOptions nccl = testing::fake_nccl_options();
  const std::vector<std::string> failures =
      connect({{.nccl = nccl, .device = 0},
               {.choice = DeviceEngineChoice::kStaged, .nccl = nccl, .device = 1}},
              std::make_shared<Lines>());
  EXPECT_EQ(cause_of(failures[0]), cause_of(failures[1]));
  EXPECT_THAT(failures[0], AllOf(HasSubstr("kInvalidArgument: "),
                                 HasSubstr("rank 0 passes DeviceEngineChoice::kAuto and rank 1 "
                                           "passes DeviceEngineChoice::kStaged")));
}

// The size of a piece decides how many collectives of the host a call makes.
TEST_P(EngineChoiceTest, DifferentSizesOfPiecesAreTheSameErrorOnAllRanks) {
  std::vector<std::string> failures(2);
  const auto result = testing::run_ranks_as_threads(2, [&](testing::RankContext& context) {
    const auto rank = static_cast<size_t>(context.rank.value);
    CommunicatorOptions options{.timeout = testing::kRankTimeout};
    options.device_backend = {.device = *device::to_core(late::device(context.rank)),
                              .make = staged_engine(rank == 0 ? 64 : 32)};
    failures[rank] = failure_of([&] { testing::connect_ranks(context, options); });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(cause_of(failures[0]), cause_of(failures[1]));
  EXPECT_THAT(failures[0], AllOf(HasSubstr("kInvalidArgument: "),
                                 HasSubstr("rank 0 passes staged_engine(64) and rank 1 passes "
                                           "staged_engine(32); pass one on all ranks")));
}

TEST_P(EngineChoiceTest, DemandedNcclThatOneRankLacksIsTheSameErrorOnAllRanks) {
  NcclOptions absent = testing::fake_nccl_options();
  absent.library = "/no/such/libnccl.so";
  const std::vector<std::string> failures = connect(
      {{.choice = DeviceEngineChoice::kNccl, .nccl = testing::fake_nccl_options(), .device = 0},
       {.choice = DeviceEngineChoice::kNccl, .nccl = absent, .device = 1}},
      std::make_shared<Lines>());
  EXPECT_EQ(cause_of(failures[0]), cause_of(failures[1]));
  EXPECT_THAT(failures[0],
              AllOf(HasSubstr("kUnavailable: "), HasSubstr("rank 1: NCCL cannot be used")));
}

TEST_P(EngineChoiceTest, AnInitialisationThatFailsOnOneRankFailsOnAll) {
  NcclOptions nccl = testing::fake_nccl_options();
  fake_nccl::set_faults({.init_fails_on = 1});
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<std::string> failures =
      connect({{.choice = DeviceEngineChoice::kNccl, .nccl = nccl, .device = 0},
               {.choice = DeviceEngineChoice::kNccl, .nccl = nccl, .device = 1}},
              std::make_shared<Lines>());
  for (const std::string& failure : failures) {
    EXPECT_THAT(failure,
                AllOf(HasSubstr("rank 1 cannot connect to the others with NCCL: NCCL 2.20.0 "
                                "reports: unhandled system error (the test wants it)")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

}  // namespace
}  // namespace cadre
