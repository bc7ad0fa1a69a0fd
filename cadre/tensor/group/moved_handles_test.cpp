// Tests that every call on a moved-from or null handle throws a clear error.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/tensor/group/symmetric_tensor.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;

void require_all_refused(const std::vector<std::function<void()>>& calls) {
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string failure = failure_of(calls[i]);
    require(failure.starts_with("kInvalidArgument: ") &&
                failure.find("moved from") != std::string::npos,
            std::to_string(i) + ": " + failure);
  }
}

TEST(MovedHandles, AWorkRefusesEveryCall) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    Work work = group.barrier_async();
    const Work moved = std::move(work);
    require_all_refused({[&] { work.wait(); }, [&] { work.wait(std::chrono::seconds(1)); },
                         [&] { work.wait(Deadline(TimePoint())); }, [&] { work.is_completed(); },
                         [&] { work.error(); }, [&] { work.deadline_in(std::chrono::seconds(1)); },
                         [&] { work.on_completed([](const auto&) {}); },
                         [&] { Work(nullptr).wait(); }});
    moved.wait();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(MovedHandles, ASymmetricTensorRefusesEveryCall) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    auto tensor = SymmetricTensor::allocate(group, 4, torch::kInt);
    const SymmetricTensor moved = std::move(tensor);
    require_all_refused({[&] { tensor.local(); }, [&] { tensor.shares_memory(); },
                         [&] { tensor.peer(0); }, [&] { tensor.signal(1, 0); },
                         [&] { tensor.wait_signal(1, 0); }, [&] { tensor.has_whole(); },
                         [&] { tensor.whole(); }, [&] { tensor.signal_peers(0); },
                         [&] { tensor.wait_for_peers(0); }});
    require(moved.local().numel() == 4, "moved");
    group.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// peer() and the other calls throw after a failure of the group. Tensors that they returned before
// remain readable.
TEST(SymmetricTensor, OfAFailedGroupThrowsTheFirstFailure) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const auto parts = SymmetricTensor::allocate(group, 1024, torch::kFloat, {.with_whole = true});
    const torch::Tensor whole = parts.whole();
    parts.local().fill_(group.rank() + 1);
    group.barrier();
    if (group.rank() == 0) group.abort("a test");
    const std::string failure = failure_of([&] { group.barrier(); });
    require(failure.find("a test") != std::string::npos, failure);
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { parts.whole(); }, [&] { parts.peer(1 - group.rank()); },
             [&] { parts.signal_peers(0); }, [&] { parts.wait_for_peers(0); }}) {
      const std::string refused = failure_of(call);
      require(refused.find("a test") != std::string::npos, refused);
    }
    require(whole[1024].item<float>() == 2, "what rank 1 has written");
    require(parts.local()[0].item<float>() == group.rank() + 1, "its own");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(OwnThread, ACallbackMayHoldTheLastHandleOfAJob) {
  const testing::Resources before = testing::count_resources();
  std::optional<ProcessGroup> world = init_process_group();
  std::optional<ProcessGroup> half = world->split({.color = 1});
  static_cast<void>(half->barrier_async());
  const auto tensor = torch::ones({1});
  half->all_reduce_async(tensor).on_completed(
      [kept = std::make_shared<std::optional<ProcessGroup>>(std::move(half))](const auto&) {
        kept->reset();
      });
  world->barrier_async().on_completed([kept = std::make_shared<std::optional<ProcessGroup>>(
                                           std::move(world))](const auto&) { kept->reset(); });
  for (int i = 0; i < 20 && !testing::leftovers_since(before).empty(); ++i) {
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

}  // namespace
}  // namespace cadre
