// Tests how the groups of a mesh are created, fail together and are closed. Ranks are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>

#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;

TEST(DeviceMesh, ClosesItsGroupsWithinTheTimeout) {
  std::atomic<bool> has_closed = false;
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}});
    const ProcessGroup group = mesh.group("x");
    EXPECT_THAT(failure_of([&] { mesh.close(std::chrono::milliseconds(-1)); }),
                HasSubstr("DeviceMesh::close"));
    group.barrier();
    // Rank 1 stays alive, but does not call the second barrier of rank 0.
    if (world.rank() == 1) return has_closed.wait(false);
    const Work pending = group.barrier_async();
    const std::string failure = failure_of([&] { mesh.close(std::chrono::milliseconds(20)); });
    has_closed = true;
    has_closed.notify_all();
    EXPECT_EQ(failure, "");
    EXPECT_THAT(failure_of([&] { pending.wait(); }), HasSubstr("kAborted"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Rank 0 aborts one group. Rank 3, which is in no group with rank 0, waits in a group with rank 1
// and must fail with the same error.
TEST(DeviceMesh, ItsGroupsFailTogether) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}, {"y", 2}});
    const ProcessGroup& x = mesh.group("x");
    const ProcessGroup& y = mesh.group("y");
    world.split({.color = 0})->barrier();  // this group does not fail with the mesh
    if (world.rank() == 0) y.abort("a test");
    const std::string failure = failure_of([&] {
      while (true) (world.rank() == 3 ? x : y).barrier();
    });
    require(failure.find("abort() was called: a test") != std::string::npos, failure);
    const std::string of_world = failure_of([&] { world.barrier(); });
    require(of_world.find("abort() was called: a test") != std::string::npos, of_world);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DeviceMesh, ClosesTheGroupsThatItHasMade) {
  const auto result = run_groups(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"axis", 2}});
    const ProcessGroup group = mesh.group("axis");
    group.barrier();
    mesh.close();
    require(failure_of([&] { group.barrier(); }).find("closed") != std::string::npos, "closed");
    world.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The creation must not be retried, because a second attempt would find keys of the first one in
// the store and throw a misleading error.
TEST(DeviceMesh, AGroupThatCouldNotBeMadeIsNotTriedAgain) {
  const auto result = run_groups(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}});
    if (world.rank() == 1) return;  // leaves the world
    const std::string first = failure_of([&] { (void)mesh.group("x"); });
    require(first.find("kPeerLost: the group of mesh axis \"x\": ") == 0, first);
    require(first.find("rank 1") != std::string::npos, first);
    require(failure_of([&] { (void)mesh.group("x"); }) == first, "the same again");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
