// Tests that a snapshot of a model that is trained on a mesh of several axes can be loaded into
// every other layout of the same model, and into a plain module. Parameters and the state of AdamW
// must have equal bits under the names of the plain module, and the next step must equal that of
// one process. The seed CADRE_CASES_SEED chooses which layouts CTest saves.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/testing/core/seeds.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/axes_layouts.h"
#include "cadre/testing/torch/axes_training.h"
#include "cadre/train/checkpoint/optimizer_state.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/sharded_save.h"

namespace cadre {

namespace {

using testing::AxesRank;
using testing::Case;
using testing::Layout;
using testing::require;
using torch::Tensor;

constexpr uint64_t kSnapshotSeed = 3;
constexpr int kSavedAfter = 2;
const Case kAdamw{"gpt", "adamw", testing::kAxesRows, torch::kDouble};

// The whole tensors of a snapshot.
struct Contents {
  std::vector<Tensor> parameters;
  std::vector<NamedTensor> states;
};

std::vector<NamedTensor> whole_states(AxesRank& rank) {
  const SnapshotParts parts = rank.parts();
  const auto states = state_dict(rank.optimizer(), parts.parameters);
  std::vector<NamedTensor> whole;
  for (const ParameterShard& record : rank.records()) {
    const auto found = std::ranges::find(states, record.name, &ParameterState::parameter);
    for (const std::string key : {"exp_avg", "exp_avg_sq"}) {
      Tensor part = torch::empty({0}, torch::kDouble);
      if (found != states.end()) {
        for (const auto& [name, tensor] : found->tensors) {
          if (name == key) part = tensor;
        }
      }
      require(part.numel() == record.range.size(), "state of " + record.name);
      whole.push_back({record.name + "." + key, shard::gather_whole(record, part)});
    }
  }
  std::ranges::sort(whole, {}, &NamedTensor::name);
  return whole;
}

Contents contents_of(AxesRank& rank) {
  return {.parameters = rank.whole_parameters(), .states = whole_states(rank)};
}

void require_equal(const Contents& loaded, const Contents& saved, const std::string& what) {
  require(testing::bits_of(loaded.parameters) == testing::bits_of(saved.parameters),
          what + ": parameters");
  require(loaded.states.size() == saved.states.size(), what + ": number of states");
  for (size_t i = 0; i < saved.states.size(); ++i) {
    require(loaded.states[i].name == saved.states[i].name, what + ": names of states");
    require(torch::equal(loaded.states[i].tensor, saved.states[i].tensor),
            what + ": " + saved.states[i].name);
  }
}

void make_step(AxesRank& rank, int64_t step) {
  rank.backward(step);
  rank.update(step);
}

Contents train_and_save(const Layout& layout, const std::string& folder,
                        const std::vector<Tensor>& batches) {
  Contents saved;
  const auto whole = testing::make_axes_gpt(layout.kind, torch::kDouble, kSnapshotSeed);
  const auto result = testing::run_groups(layout.num_ranks(), [&](const ProcessGroup& world) {
    AxesRank rank(layout, kAdamw, world, *whole, batches);
    for (int64_t step = 1; step <= kSavedAfter; ++step) make_step(rank, step);
    SnapshotParts parts = rank.parts();
    parts.optimizer = state_dict(rank.optimizer(), parts.parameters);
    SnapshotFolder snapshots(folder);
    save_sharded(snapshots, kSavedAfter, parts, world);
    const Contents contents = contents_of(rank);
    if (world.rank() == 0) saved = contents;
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return saved;
}

// Loads the snapshot and runs one more step. `next` has the parameters that one process has after
// that step.
void load_and_step(const Layout& layout, const std::string& path, const Contents& saved,
                   const std::vector<Tensor>& batches, const std::vector<Tensor>& next) {
  const auto whole = testing::make_axes_gpt(layout.kind, torch::kDouble, kSnapshotSeed + 1);
  const auto result = testing::run_groups(layout.num_ranks(), [&](const ProcessGroup& world) {
    AxesRank rank(layout, kAdamw, world, *whole, batches);
    const SnapshotParts parts = rank.parts();
    const LoadedSnapshot loaded = load_sharded(path, parts, world);
    load_state_dict(rank.optimizer(), parts.parameters, loaded.optimizer);
    require_equal(contents_of(rank), saved, layout.name);
    make_step(rank, kSavedAfter + 1);
    const std::vector<Tensor> parameters = rank.whole_parameters();
    for (size_t i = 0; i < next.size(); ++i) {
      const double difference = (parameters[i] - next[i]).abs().max().item<double>();
      require(difference <= 1e-10 * testing::largest(next[i]),
              layout.name + ": parameter " + std::to_string(i) + " after the next step");
    }
  });
  EXPECT_TRUE(result.ok()) << layout.name << "\n" << result.failures();
}

class AxesSnapshots : public ::testing::TestWithParam<Layout> {};

TEST_P(AxesSnapshots, LoadIntoEveryOtherLayout) {
  const Layout& saver = GetParam();
  at::set_num_threads(1);
  const std::vector<Tensor> batches = testing::axes_batches(kSavedAfter + 1);
  const auto alone = testing::make_axes_gpt(saver.kind, torch::kDouble, kSnapshotSeed);
  const std::vector<Tensor> next =
      testing::train_axes_alone(kAdamw, *alone, batches).training.parameters;
  const testing::TemporaryFolder folder;
  const Contents saved = train_and_save(saver, folder.path(), batches);
  ASSERT_FALSE(saved.parameters.empty());
  const std::string path = SnapshotFolder(folder.path()).latest().value();

  const auto plain = testing::make_axes_gpt(saver.kind, torch::kDouble, kSnapshotSeed + 1);
  load_sharded(path, parts_of(*plain));
  EXPECT_EQ(testing::bits_of(testing::parameters_of(*plain)), testing::bits_of(saved.parameters));
  for (const Layout& loader : testing::axes_layouts()) {
    if (loader.kind.is_tied != saver.kind.is_tied) continue;
    if (loader.kind.has_experts != saver.kind.has_experts) continue;
    load_and_step(loader, path, saved, batches, next);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, AxesSnapshots,
                         ::testing::ValuesIn(testing::share_of(testing::axes_layouts())),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace cadre
