// Tests a blocking call that times out while the engine (the backend that moves the data) cannot be
// aborted and still runs. The memory of the call must be kept until the engine has ended, whatever
// the program does with its tensors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/groups/lone_group.h"
#include "cadre/core/os/system.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/fake_stream_backend.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using torch::Tensor;

constexpr Duration kPatience = std::chrono::seconds(20);
constexpr Duration kSoon = std::chrono::milliseconds(30);

// An engine that reads every byte of the input and writes every byte of the output, so that an
// access to freed memory is detected. The values do not matter.
class TouchingPeers final : public testing::FakePeers {
 public:
  Status run(const testing::FakeRank&, const OpContext&, const Collective& collective) override {
    std::byte all{0};
    for (const std::byte byte : collective.in) all |= byte;
    std::ranges::fill(collective.out, all);
    return {};
  }
};

// The test is rank 0 of a group of two ranks. The engine begins to move data only after the test
// has opened gate_.
class AbandonedMemoryTest : public ::testing::Test {
 protected:
  // Runs the call until it times out. Afterwards the tensors of the call are destroyed.
  void expect_timeout(const std::function<void(const ProcessGroup&)>& call) {
    const std::string failure = testing::failure_of([&] { call(group_); });
    EXPECT_THAT(failure, ::testing::StartsWith("kTimeout"));
  }
  void let_engine_end() {
    gate_.set();
    await([&] { return num_ended_ == 1; });
  }
  void await(const std::function<bool()>& is_met) {
    const Deadline deadline = system_.deadline_in(kPatience);
    while (!is_met() && !deadline.has_passed(system_.now())) {
      system_.make_waiter()->park(system_.deadline_in(std::chrono::milliseconds(1)));
    }
    EXPECT_TRUE(is_met());
  }

  os::System& system_ = testing::process_system();
  testing::FakeEvent gate_{system_};
  std::atomic<int> num_ended_{0};
  const ProcessGroup group_ = [this] {
    CommunicatorOptions options;
    options.timeout = kPatience;
    options.backend = testing::fake_stream_backend(
        std::make_shared<TouchingPeers>(),
        std::make_shared<testing::FakeCalls>([this](testing::FakeCall& call) {
          gate_.wait(system_.deadline_in(kPatience));
          Status status = call.pass_on();
          ++num_ended_;
          return status;
        }));
    return ProcessGroup(make_lone_group(system_, 2, options));
  }();
};

using Call = std::function<void(const ProcessGroup&, const Tensor& small, const Tensor& large)>;

class AbandonedTensorsTest : public AbandonedMemoryTest,
                             public ::testing::WithParamInterface<std::pair<const char*, Call>> {};

TEST_P(AbandonedTensorsTest, OutliveTheCallUntilTheEngineHasEnded) {
  std::vector<float> small(4, 1);
  std::vector<float> large(8, 1);
  std::atomic<int> num_freed{0};
  const auto tensor_on = [&](std::vector<float>& values) {
    return torch::from_blob(values.data(), {static_cast<int64_t>(values.size())},
                            [&](void*) { ++num_freed; });
  };
  const int num_used = std::string(GetParam().first).find("pair") == std::string::npos ? 1 : 2;
  expect_timeout([&](const ProcessGroup& group) {
    GetParam().second(group, tensor_on(small), tensor_on(large));
  });
  EXPECT_EQ(num_freed, 2 - num_used) << "of the two tensors";
  let_engine_end();
  await([&] { return num_freed == 2; });
}

INSTANTIATE_TEST_SUITE_P(
    Calls, AbandonedTensorsTest,
    ::testing::ValuesIn(std::vector<std::pair<const char*, Call>>{
        {"all_reduce", [](const ProcessGroup& group, const Tensor& small,
                          const Tensor&) { group.all_reduce(small, {.timeout = kSoon}); }},
        {"broadcast", [](const ProcessGroup& group, const Tensor& small,
                         const Tensor&) { group.broadcast(small, {.timeout = kSoon}); }},
        {"reduce", [](const ProcessGroup& group, const Tensor& small,
                      const Tensor&) { group.reduce(small, {.timeout = kSoon}); }},
        {"all_gather_pair",
         [](const ProcessGroup& group, const Tensor& small, const Tensor& large) {
           group.all_gather(large, small, {.timeout = kSoon});
         }},
        {"reduce_scatter_pair",
         [](const ProcessGroup& group, const Tensor& small, const Tensor& large) {
           group.reduce_scatter(small, large, {.timeout = kSoon});
         }},
        {"gather_pair",
         [](const ProcessGroup& group, const Tensor& small,
            const Tensor& large) { group.gather(large, small, {.timeout = kSoon}); }},
        {"scatter_pair",
         [](const ProcessGroup& group, const Tensor& small,
            const Tensor& large) { group.scatter(small, large, {.timeout = kSoon}); }},
        {"all_to_all_pair",
         [](const ProcessGroup& group, const Tensor& small, const Tensor& large) {
           group.all_to_all(large.narrow(0, 0, 4), small, {.timeout = kSoon});
         }}}),
    [](const auto& call) { return std::string(call.param.first); });

// The number of elements of tensors that a call packs into a copy of its own. The copy is so large
// that freeing it unmaps its pages, so an engine that still used it would crash the process.
constexpr int64_t kLargeNumel = int64_t{16} << 20;

TEST_F(AbandonedMemoryTest, ThePackedCopyOfATransposedTensorStays) {
  expect_timeout([](const ProcessGroup& group) {
    group.all_reduce(torch::ones({2, kLargeNumel / 2}).t(), {.timeout = kSoon});
  });
  let_engine_end();
}

TEST_F(AbandonedMemoryTest, ThePackedListsStay) {
  expect_timeout([](const ProcessGroup& group) {
    const Tensor input = torch::ones({kLargeNumel / 2});
    group.all_gather({torch::empty_like(input), torch::empty_like(input)}, input,
                     {.timeout = kSoon});
  });
  let_engine_end();
}

}  // namespace
}  // namespace cadre
