// Tests the coordinates of ranks in a mesh, when and how often groups are created, and errors.
// Ranks are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;

int64_t sum_over(const ProcessGroup& group, int64_t value) {
  const Tensor sum = torch::full({1}, value, torch::kLong);
  group.all_reduce(sum);
  return sum.item<int64_t>();
}

const Communicator* address_of(const ProcessGroup& group) {
  return &group.communicator();
}

struct Grid {
  std::vector<MeshAxis> axes;
  int num_ranks;
};

const Grid kGrids[] = {{{{"x", 3}}, 3},
                       {{{"x", 2}, {"y", 2}}, 4},
                       {{{"x", 2}, {"y", 3}}, 6},
                       {{{"x", 2}, {"y", 1}, {"z", 2}}, 4},
                       {{{"x", 2}, {"y", 2}, {"z", 2}}, 8}};

// Returns a rank's coordinates by axis. Divides the rank by the sizes, beginning with the last
// axis.
std::vector<int> expected_coordinates(const Grid& grid, int rank) {
  std::vector<int> coordinates(grid.axes.size());
  for (size_t axis = grid.axes.size(); axis-- > 0;) {
    coordinates[axis] = rank % grid.axes[axis].size;
    rank /= grid.axes[axis].size;
  }
  return coordinates;
}

// Returns the ranks that differ from rank `self` only along these axes.
std::vector<int> expected_ranks(const Grid& grid, int self, const std::vector<size_t>& axes) {
  std::vector<int> ranks;
  const std::vector<int> own = expected_coordinates(grid, self);
  for (int rank = 0; rank < grid.num_ranks; ++rank) {
    std::vector<int> coordinates = expected_coordinates(grid, rank);
    for (const size_t axis : axes) coordinates[axis] = own[axis];
    if (coordinates == own) ranks.push_back(rank);
  }
  return ranks;
}

TEST(DeviceMesh, RanksAndCoordinatesFollowTheFormula) {
  for (const Grid& grid : kGrids) {
    const auto result = run_groups(grid.num_ranks, [&](const ProcessGroup& world) {
      const DeviceMesh mesh(world, grid.axes);
      require(mesh.axes() == grid.axes && mesh.size() == grid.num_ranks, "axes");
      const std::vector<int> coordinates = expected_coordinates(grid, world.rank());
      require(mesh.coordinates() == coordinates, "coordinates");
      for (size_t axis = 0; axis < grid.axes.size(); ++axis) {
        const std::string& name = grid.axes[axis].name;
        require(mesh.size(name) == grid.axes[axis].size, "size of " + name);
        require(mesh.shape()[axis] == grid.axes[axis].size, "shape");
        require(mesh.coordinate(name) == coordinates[axis], "coordinate in " + name);
        const std::vector<int> ranks = expected_ranks(grid, world.rank(), {axis});
        require(mesh.ranks(name) == ranks, "ranks along " + name);
        const ProcessGroup& group = mesh.group(name);
        require(group.global_ranks() == ranks, "ranks of group " + name);
        require(group.rank() == coordinates[axis], "rank in " + name);
        int64_t sum = 0;
        for (const int rank : ranks) sum += rank;
        require(sum_over(group, world.rank()) == sum, "sum over " + name);
      }
      mesh.close();
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// A later call, a copy, a slice and another name for the same ranks return the same group.
TEST(DeviceMesh, AGroupIsMadeAtItsFirstUseAndOnce) {
  const auto result = run_groups(8, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}, {"y", 2}, {"z", 2}});
    const uint64_t num_collectives = world.communicator().num_collectives();
    require(num_collectives == 1, "a mesh costs one collective");
    // Only ranks with x = 0 make this call, because no other rank is a member.
    if (mesh.coordinate("x") == 0) {
      const Communicator* first = address_of(mesh.group("y"));
      require(first == address_of(mesh.group("y")), "again");
      const DeviceMesh copy = mesh;
      require(first == address_of(copy.group("y")), "a copy");
      require(first == address_of(mesh.slice({"y", "z"}).group("y")), "a slice");
      require(first == address_of(mesh["y"].group("y")), "a slice of one axis");
      require(first == address_of(mesh.flatten({"y"}, "other").group("other")), "one axis flat");
      require(first == address_of(mesh.joint_group({"y"})), "a list of one");
      const Communicator* both = address_of(mesh.joint_group({"y", "z"}));
      require(both == address_of(mesh.flatten({"z", "y"}, "yz").group("yz")), "two axes flat");
      require(both == address_of(mesh.slice({"y", "z"}).joint_group()), "all axes of a slice");
      require(both != first, "other ranks");
      require(both->num_collectives() == 0 && first->num_collectives() == 0, "no collective");
    }
    require(mesh.joint_group().global_ranks() == world.global_ranks(), "all axes of the mesh");
    require(world.communicator().num_collectives() == num_collectives, "none of the world");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DeviceMesh, MeshesOfOneWorldHaveGroupsOfTheirOwn) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh first(world, {{"x", 2}, {"y", 2}});
    const DeviceMesh same(world, {{"x", 2}, {"y", 2}});
    const DeviceMesh other(world, {{"all", 4}});
    // Two meshes with equal axes over the same ranks do not share groups.
    require(address_of(first.group("y")) != address_of(same.group("y")), "groups of two meshes");
    require(sum_over(same.group("x"), world.rank()) == (world.rank() % 2 == 0 ? 2 : 4), "x");
    require(sum_over(other.group("all"), world.rank()) == 6, "all");
    require(address_of(other.group("all")) != &world.communicator(), "not the world itself");
    other.close();
    require(sum_over(first.group("y"), 1) == 2, "the other meshes stay");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DeviceMesh, SlicesAndFlattenedMeshesKeepTheOrder) {
  const Grid grid{{{"x", 2}, {"y", 2}, {"z", 2}}, 8};
  const auto result = run_groups(8, [&](const ProcessGroup& world) {
    const DeviceMesh mesh(world, grid.axes);
    const std::vector<int> own = expected_coordinates(grid, world.rank());
    const DeviceMesh slice = mesh.slice({"x", "z"});
    require(slice.axes() == std::vector<MeshAxis>({{"x", 2}, {"z", 2}}), "axes of the slice");
    require(slice.size() == 4 && slice.coordinates() == std::vector<int>({own[0], own[2]}),
            "coordinates in the slice");
    require(slice.ranks("z") == mesh.ranks("z"), "ranks in the slice");
    const DeviceMesh flat = mesh.flatten({"x", "z"}, "xz");
    require(flat.axes() == std::vector<MeshAxis>({{"xz", 4}, {"y", 2}}), "axes");
    require(flat.coordinate("xz") == own[0] * 2 + own[2], "a row-major coordinate");
    require(flat.ranks("xz") == expected_ranks(grid, world.rank(), {0, 2}), "ranks");
    require(flat.ranks("y") == mesh.ranks("y"), "the axis that stays");
    require(flat.group("xz").global_ranks() == flat.ranks("xz"), "ranks of the group");
    require(flat.group("xz").rank() == flat.coordinate("xz"), "rank in the group");
    const DeviceMesh all = flat.flatten({"xz", "y"}, "all");
    require(all.ranks("all") == std::vector<int>({0, 2, 1, 3, 4, 6, 5, 7}), "by x, z and y");
    require(sum_over(all.group("all"), world.rank()) == 28, "sum over all");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DeviceMesh, SlicesJoinInTheOrderOfTheirMesh) {
  const auto result = run_groups(8, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}, {"y", 1}, {"z", 2}, {"w", 2}});
    const DeviceMesh joined = mesh["w"].joined_with(mesh.slice({"x", "y"}));
    require(joined.to_string() == "{x: 2, y: 1, w: 2}", joined.to_string());
    require(joined.coordinate("x") == world.rank() / 4, "x");
    require(joined.coordinate("w") == world.rank() % 2, "w");
    require(address_of(joined.group("w")) == address_of(mesh.group("w")), "group");
    require(joined.joined_with(mesh["x"]).to_string() == joined.to_string(), "twice");
    require(joined.whole().to_string() == mesh.to_string(), joined.whole().to_string());
    const DeviceMesh flat = mesh.flatten({"x", "z"}, "all");
    require(flat["all"].joined_with(mesh["w"]).to_string() == "{all: 4, w: 2}", "flattened");
    EXPECT_THAT(failure_of([&] { flat["all"].joined_with(mesh["z"]); }),
                HasSubstr("joined_with {z: 2}: axis \"z\" overlaps axis \"all\"; use axes of the "
                          "mesh, or the same flattened axis in both"));
    const DeviceMesh unlike = mesh.flatten({"x", "w"}, "all");
    EXPECT_THAT(failure_of([&] { flat["all"].joined_with(unlike["all"]); }),
                HasSubstr("joined_with {all: 4}: axis \"all\" overlaps axis \"all\""));
    const DeviceMesh apart = mesh.slice({"y", "w"}).flatten({"y", "w"}, "all");
    EXPECT_THAT(failure_of([&] { flat["all"].joined_with(apart); }),
                HasSubstr("joined_with {all: 2}: both have an axis \"all\", along which different "
                          "ranks lie"));
    const DeviceMesh other(world, {{"x", 2}, {"y", 4}});
    EXPECT_THAT(
        failure_of([&] { mesh["x"].joined_with(other["y"]); }),
        HasSubstr(
            "joined_with {y: 4}: the two come from different meshes; slice both from one mesh of "
            "all ranks"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DeviceMesh, AWorldOfOneNeedsNoStore) {
  const auto result = run_groups(1, [](const ProcessGroup& world) {
    require(world.communicator().membership().store == nullptr, "there is none");
    const DeviceMesh mesh(world, {{"dp", 1}, {"tp", 1}});
    require(sum_over(mesh.group("tp"), 5) == 5, "the value");
    require(address_of(mesh.group("tp")) == address_of(mesh.group("dp")), "the same ranks");
    require(mesh.flatten({"dp", "tp"}, "all").ranks("all") == std::vector<int>{0}, "ranks");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The mesh is over a group with only some ranks of the job. ranks() must return ranks of the whole
// job.
TEST(DeviceMesh, RanksAreThoseOfTheWorldThatWasConnectedFirst) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    const auto odd = world.split({.color = world.rank() % 2});
    const DeviceMesh mesh(*odd, {{"x", 2}});
    require(mesh.ranks("x") == std::vector<int>({world.rank() % 2, world.rank() % 2 + 2}), "ranks");
    require(mesh.group("x").global_ranks() == mesh.ranks("x"), "of the group");
    require(sum_over(mesh.group("x"), world.rank()) == (world.rank() % 2 == 0 ? 2 : 4), "sum");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Several threads of each rank call group() at the same time. Each rank creates the group once, and
// all threads get it.
TEST(DeviceMesh, ThreadsThatAskAtOnceGetOneGroup) {
  const auto result = run_groups(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}});
    std::vector<const Communicator*> found(4);
    std::vector<std::string> failures(found.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < found.size(); ++i) {
      threads.emplace_back(
          [&, i] { failures[i] = failure_of([&] { found[i] = address_of(mesh.group("x")); }); });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < found.size(); ++i) {
      require(failures[i].empty(), failures[i]);
      require(found[i] == found.front(), "one group");
    }
    require(sum_over(mesh.group("x"), 1) == 2, "it works");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DeviceMesh, AxesThatDoNotMakeAGridAreRefused) {
  const auto result = run_groups(2, [](const ProcessGroup& world) {
    const auto expect = [&](const std::vector<MeshAxis>& axes, const std::string& sentence) {
      const std::string failure = failure_of([&] { const DeviceMesh mesh(world, axes); });
      require(failure.find("kInvalidArgument") == 0, failure);
      require(failure.find(sentence) != std::string::npos, failure);
    };
    expect({}, "it has no axis");
    expect({{"x", 3}},
           format("DeviceMesh {{x: 3}} on group \"world\", rank {}: the product of the sizes is 3, "
                  "but the group has 2 ranks; choose sizes whose product is that",
                  world.rank()));
    expect({{"x", 65536}, {"y", 65536}}, "the group has 2 ranks");
    expect({{"x", 2}, {"", 1}}, "an axis has no name");
    expect({{"x", 2}, {"x", 1}}, "the name \"x\" appears twice");
    expect({{"x", 2}, {"y", 0}}, "the size of axis \"y\" is 0; choose at least 1");
    expect({{"x", -2}, {"y", -1}}, "the size of axis \"x\" is -2");
    const DeviceMesh mesh(world, {{"x", 2}, {"y", 1}});
    const auto refused = [&](const std::function<void()>& call, const std::string& sentence) {
      const std::string failure = failure_of(call);
      require(failure.find("kInvalidArgument: DeviceMesh {x: 2, y: 1} on group \"world\"") == 0,
              failure);
      require(failure.find(sentence) != std::string::npos, failure);
    };
    refused([&] { (void)mesh.group("tp"); }, "it has no axis \"tp\"");
    refused([&] { (void)mesh.size("tp"); }, "it has no axis \"tp\"");
    refused([&] { (void)mesh["tp"]; }, "it has no axis \"tp\"");
    refused([&] { (void)mesh.slice({}); }, "no axis is named");
    refused([&] { (void)mesh.slice({"x", "x"}); }, "axis \"x\" is named twice");
    refused([&] { (void)mesh.slice({"y", "x"}); }, "name the axes in the order of the mesh");
    refused([&] { (void)mesh.flatten({"x"}, ""); }, "the new axis has no name");
    refused([&] { (void)mesh.flatten({"x"}, "y"); }, "the mesh has an axis \"y\" already");
    require(sum_over(world, 1) == 2, "the world goes on");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DeviceMesh, RanksThatMakeOtherMeshesAllSaySo) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    const std::vector<MeshAxis> axes = world.rank() >= 2
                                           ? std::vector<MeshAxis>{{"x", 4}}
                                           : std::vector<MeshAxis>{{"x", 2}, {"y", 2}};
    const std::string failure = failure_of([&] { const DeviceMesh mesh(world, axes); });
    require(
        failure ==
            "kInvalidArgument: DeviceMesh on group \"world\": the mesh is {x: 2, y: 2} on rank 0 "
            "and {x: 4} on rank 2; let all ranks make the same meshes in the same order",
        failure);
    require(sum_over(world, 1) == 4, "the world goes on");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// All ranks must throw the same error at once, and not time out.
TEST(DeviceMesh, AxesThatAreWrongOnOneRankAreRefusedOnAll) {
  const auto result = run_groups(2, [](const ProcessGroup& world) {
    const auto expect = [&](const std::vector<MeshAxis>& first, const std::vector<MeshAxis>& second,
                            const std::string& sentence) {
      const auto& axes = world.rank() == 0 ? first : second;
      const std::string failure = failure_of([&] { const DeviceMesh mesh(world, axes); });
      require(failure == "kInvalidArgument: DeviceMesh on group \"world\": " + sentence +
                             "; let all ranks make the same meshes in the same order",
              failure);
      require(sum_over(world, 1) == 2, "the world goes on");
    };
    expect({{"x", 2}}, {{"x", 3}}, "the mesh is {x: 2} on rank 0 and {x: 3} on rank 1");
    expect({}, {{"x", 2}}, "the mesh is {} on rank 0 and {x: 2} on rank 1");
    // The axis names have 1,000 characters and differ only in the last one, so they must be
    // exchanged in full.
    const std::string name(1000, 'x');
    expect({{name + "a", 2}}, {{name + "b", 2}},
           "the mesh is {" + name + "a: 2} on rank 0 and {" + name + "b: 2} on rank 1");
    // The axis names contain the separators of the text form. Quoting must keep the lists
    // distinguishable.
    expect({{"a: 1, b", 2}}, {{"a", 1}, {"b", 2}},
           "the mesh is {\"a: 1, b\": 2} on rank 0 and {a: 1, b: 2} on rank 1");
    expect({{"a\": 1, \"b", 2}}, {{"a:", 1}, {"b:", 2}},
           "the mesh is {\"a\\\": 1, \\\"b\": 2} on rank 0 and {\"a:\": 1, \"b:\": 2} on rank 1");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
