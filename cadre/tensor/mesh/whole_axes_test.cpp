#include "cadre/tensor/mesh/whole_axes.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::mesh {
namespace {

using testing::require;
using testing::run_groups;

// Makes the axis on ranks that have not flattened it. The parts come in another order than in the
// mesh.
TEST(WholeAxes, AnAxisIsMadeAgainFromTheAxesItConsistsOf) {
  const auto result = run_groups(8, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}, {"y", 2}, {"z", 2}});
    const DeviceMesh nested = mesh.flatten({"x", "z"}, "xz").flatten({"xz", "y"}, "all");
    const std::vector<std::string> parts = whole_axes_of(nested, "all");
    require(parts == std::vector<std::string>{"x", "z", "y"}, "parts");
    const DeviceMesh again = axis_over(mesh["y"], parts, "all");
    require(again.to_string() == "{all: 8}", again.to_string());
    require(again.coordinate("all") == nested.coordinate("all"), "coordinate");
    require(again.ranks("all") == nested.ranks("all"), "ranks");
    require(nested["all"].joined_with(again).to_string() == "{all: 8}", "the same axis");
    require(whole_axes_of(mesh, "y") == std::vector<std::string>{"y"}, "one axis");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(WholeAxes, FindsTheAxisOfAGroup) {
  const auto result = run_groups(8, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}, {"y", 2}, {"z", 2}});
    require(axis_of(mesh["x"], mesh.group("y")).value().to_string() == "{y: 2}", "a slice");
    require(!axis_of(mesh, mesh.joint_group({"x", "y"})), "two axes");
    require(!axis_of(mesh, world), "the world");
    // This group has the same ranks as a group of the mesh, but does not belong to the mesh.
    const ProcessGroup pairs = *world.split({.color = world.rank() / 2});
    require(axis_of(mesh, pairs).value().to_string() == "{z: 2}", "another group");
    pairs.close();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::mesh
