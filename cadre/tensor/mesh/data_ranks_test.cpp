// Tests which ranks of a mesh get the same rows of a batch and which get different ones. Ranks are
// threads.
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cadre/tensor/mesh/data_ranks.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;

TEST(DataRanks, DifferAlongTheAxesOfTheData) {
  const auto result = run_groups(8, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}, {"tp", 2}});
    const DataRanks data = data_ranks(mesh);
    require(data.size == 2, "size");
    require(data.rank == world.rank() / 2 % 2, "rank");
    require(data.group->world_size() == 2 && data.group->rank() == data.rank, "group");

    const DeviceMesh sharded(world, {{"dp_replicate", 2}, {"cp", 2}, {"dp_shard", 2}});
    const DataRanks parts = data_ranks(sharded);
    require(parts.size == 4, "size of two axes");
    require(parts.rank == world.rank() / 4 * 2 + world.rank() % 2, "rank of two axes");

    const DataRanks same = data_ranks(DeviceMesh(world, {{"pp", 4}, {"tp", 2}}));
    require(same.size == 1 && same.rank == 0 && !same.group, "without an axis of the data");

    const DeviceMesh named(world, {{"replica", 2}, {"model", 2}, {"ep", 2}});
    const DataRanks given =
        data_ranks(named, {.split_axes = {"replica"}, .shared_axes = {"model", "ep"}});
    require(given.size == 2 && given.rank == world.rank() / 4, "named by the options");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DataRanks, TheMeanIsThatOfTheParts) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    const at::Tensor own = at::full({1}, 1.0 + world.rank(), at::kDouble).requires_grad_(true);
    const at::Tensor mean = data_ranks(DeviceMesh(world, {{"tp", 2}, {"dp", 2}})).mean(own);
    require(mean.item<double>() == (world.rank() < 2 ? 1.5 : 3.5), "mean along dp");
    require(!mean.requires_grad() && own.item<double>() == 1 + world.rank(), "a new tensor");
    const at::Tensor same = data_ranks(DeviceMesh(world, {{"tp", 4}})).mean(own);
    require(same.equal(own) && !same.is_same(own), "one part");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DataRanks, RefuseWhatTheyDoNotKnow) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"dp", 2}, {"model", 2}});
    EXPECT_THAT(
        failure_of([&] { data_ranks(mesh); }),
        HasSubstr(
            "data_ranks {dp: 2, model: 2}: it is not known whether ranks along \"model\" have "
            "different rows of a batch. Name it in split_axes of the options if they do, else in "
            "shared_axes"));
    EXPECT_THAT(failure_of([&] { data_ranks(mesh["dp"]); }),
                HasSubstr("data_ranks {dp: 2}: this mesh is a slice of {dp: 2, model: 2}, whose "
                          "other axes also determine which rows a rank has; pass the whole mesh"));
    EXPECT_THAT(
        failure_of([&] { data_ranks(mesh, {.split_axes = {"model"}, .shared_axes = {"model"}}); }),
        HasSubstr(
            "the options name \"model\" as an axis with different rows and as one with the same "
            "rows; name it once"));
    EXPECT_THAT(failure_of([&] { data_ranks(mesh, {.shared_axes = {"mdoel"}}); }),
                HasSubstr("it has no axis \"mdoel\""));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
