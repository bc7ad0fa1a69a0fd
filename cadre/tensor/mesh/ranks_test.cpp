// Tests the conversion of a ProcessGroup and of a DeviceMesh to Ranks. Ranks are threads.
#include "cadre/tensor/mesh/ranks.h"

#include <gtest/gtest.h>

#include <string>

#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;

TEST(Ranks, AreThoseOfAGroupOrAlongTheAxesOfAMesh) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    const Ranks all = world;
    require(all.size() == 4 && !all.mesh(), "of the group");
    require(all.group_of_one_axis("F()", "dp").world_size() == 4, "its group");
    const DeviceMesh made = all.mesh_with_axis("dp");
    require(made.size() == 4 && made.axes().size() == 1 && made.axes()[0].name == "dp", "its mesh");

    const DeviceMesh mesh(world, {{"dp", 2}, {"tp", 2}});
    const Ranks both = mesh;
    require(both.size() == 4 && both.group().world_size() == 4, "of two axes");
    require(both.group().rank() == world.rank(), "row-major");
    require(both.mesh_with_axis("x").axes().size() == 2, "the mesh itself");
    const std::string refusal = failure_of([&] { (void)both.group_of_one_axis("F()", "dp"); });
    require(refusal.starts_with("kInvalidArgument: F(): the mesh ") &&
                refusal.find("has 2 axes; pass one of them: mesh[\"dp\"]") != std::string::npos,
            refusal);

    const Ranks columns = mesh["tp"];
    require(columns.size() == 2, "of one axis");
    require(columns.group_of_one_axis("F()", "tp").rank() == world.rank() % 2, "rank in the axis");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
