// Tests that write_full_state() turns a sharded snapshot into one file of whole tensors.
#include "cadre/train/checkpoint/full_state.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "cadre/parallel/shard/division/boxes.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/snapshot_samples.h"
#include "cadre/train/checkpoint/module_file.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/sharded_save.h"

namespace cadre {
namespace {

using testing::run_groups;

TEST(ShardedSnapshot, AFullStateIsAFileThatAPlainModuleLoads) {
  const testing::TemporaryFolder run;
  const auto make = [] {
    return torch::nn::Sequential(torch::nn::Linear(5, 3), torch::nn::BatchNorm1d(3));
  };
  const auto trained = make();
  torch::manual_seed(3);
  for (const at::Tensor& tensor : trained->parameters()) torch::nn::init::normal_(tensor);
  SnapshotParts whole = parts_of(*trained);
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    SnapshotParts parts;
    parts.buffers = whole.buffers;
    for (const SnapshotTensor& tensor : whole.parameters) {
      const int64_t numel = tensor.values.numel();
      const FlatRange range{numel * group.rank() / 3, numel * (group.rank() + 1) / 3};
      parts.parameters.push_back(
          {tensor.name, tensor.sizes, shard::boxes_of_range(tensor.boxes[0], range),
           tensor.values.detach().view({-1}).slice(0, range.begin, range.end)});
    }
    SnapshotFolder folder(run.path());
    save_sharded(folder, 1, parts, group);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  const std::string file = run.file("net.safetensors");
  write_full_state(SnapshotFolder(run.path()).path_of(1), file);
  auto plain = make();
  load(plain, file);
  for (const auto& item : trained->named_parameters()) {
    EXPECT_TRUE(plain->named_parameters()[item.key()].equal(item.value())) << item.key();
  }
  // load_sharded() accepts the file, too: as a snapshot of one rank without an optimizer.
  const auto again = make();
  const LoadedSnapshot loaded = load_sharded(file, parts_of(*again));
  EXPECT_TRUE(loaded.optimizer.empty());
  EXPECT_TRUE(again->named_parameters()["0.weight"].equal(trained->named_parameters()["0.weight"]));
}

}  // namespace
}  // namespace cadre
