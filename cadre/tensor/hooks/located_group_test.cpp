// Tests what happens when the last copy of a LocatedGroup is destroyed.
#include "cadre/tensor/hooks/located_group.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <chrono>

#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::wrap {
namespace {

using testing::require;
using testing::run_groups;
using torch::Tensor;
using namespace std::chrono_literals;

// Rank 0 destroys all its copies of the LocatedGroup while an operation is in flight that rank 1
// has not started yet. The destructor must wait for the operation.
TEST(LocatedGroup, TheLastCopyWaitsForWhatRuns) {
  const auto result = run_groups(2, [](const ProcessGroup& world) {
    const Tensor sum = torch::ones({4});
    {
      const LocatedGroup group(*world.new_group({0, 1}));
      const LocatedGroup copy = group;
      os::System& system = world.communicator().system();
      if (group.rank() == 1) system.make_waiter()->park(system.deadline_in(50ms));
      static_cast<void>(copy.all_reduce_async(sum, ReduceOp::kSum));
    }
    require(torch::equal(sum, torch::full({4}, 2.0)), "the operation has ended");
    world.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(LocatedGroup, TheLastCopyDoesNotWaitInAFailedGroup) {
  const auto result = run_groups(2, [](const ProcessGroup& world) {
    os::System& system = world.communicator().system();
    const TimePoint began = system.now();
    {
      const LocatedGroup group(*world.new_group({0, 1}));
      if (group.rank() == 1) {
        group.process_group().communicator().abort("a test");
      } else {
        static_cast<void>(group.all_reduce_async(torch::ones({4}), ReduceOp::kSum));
      }
    }
    require(system.now() - began < 5s, "no wait for the limit");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::wrap
