// Tests snapshots of pipelines with a weight that is tied between the first and the last stage,
// each of which has a tensor of it. In schedules that put both stages on one rank, that rank has
// two tensors of one name. If stages are sharded, the two tensors are divided at different
// elements. The ranks are threads and train with AdamW in float64.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "cadre/core/schedule/generate.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/checkpoint/optimizer_state.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/snapshot_saver.h"

namespace cadre {
namespace {

using testing::require;
using torch::Tensor;

// This number of words lets two ranks divide the tied weight at different rows in the first and in
// the last stage.
constexpr int64_t kWords = 40;
constexpr int64_t kWidth = 3;
constexpr int kSavedAfter = 2;

struct TiedCase {
  std::string schedule;
  int stages_per_rank;
  bool is_sharded;
};

std::ostream& operator<<(std::ostream& out, const TiedCase& given) {
  std::string name = given.schedule;
  std::ranges::replace(name, '-', '_');
  return out << name << (given.is_sharded ? "_sharded" : "");
}

Tensor filled(const std::vector<int64_t>& sizes, double offset) {
  const Tensor values = torch::arange(c10::multiply_integers(sizes), torch::kDouble) + offset;
  return values.sin().view(sizes).clone().requires_grad_();
}

// Returns the parameters of a stage, with the names of the plain model. In the last stage the tied
// weight comes after other parameters.
std::vector<NamedTensor> parameters_of(int stage, int num_stages, double offset) {
  std::vector<NamedTensor> parameters;
  if (stage == 0) parameters.push_back({"tokens", filled({kWords, kWidth}, offset)});
  parameters.push_back({"weight" + std::to_string(stage), filled({kWidth}, offset + stage)});
  if (stage != num_stages - 1) return parameters;
  parameters.push_back({"scale", filled({5}, offset + 9)});
  parameters.push_back({"tokens", filled({kWords, kWidth}, offset + 20)});
  return parameters;
}

TensorFunction function_of(int stage, int num_stages, const std::vector<NamedTensor>& parameters) {
  return [=](const std::vector<Tensor>& inputs) -> std::vector<Tensor> {
    const auto named = [&](const std::string& name) {
      return std::ranges::find(parameters, name, &NamedTensor::name)->tensor;
    };
    Tensor h = stage == 0 ? torch::embedding(named("tokens"), inputs[0]) : inputs[0];
    h = torch::tanh(h + named("weight" + std::to_string(stage)));
    if (stage != num_stages - 1) return {h};
    return {torch::linear(h * named("scale").sum(), named("tokens"))};
  };
}

// The pipeline of one rank and its optimizer. `offset` makes the initial values differ.
class TiedRank {
 public:
  TiedRank(const TiedCase& given, const DeviceMesh& mesh, double offset) {
    const auto schedule =
        make_pipeline_schedule({.kind = find_pipeline_schedule(given.schedule)->kind,
                                .num_ranks = 2,
                                .num_microbatches = 4,
                                .stages_per_rank = given.stages_per_rank})
            .value_or_throw();
    const int count = schedule.num_stages();
    std::vector<PipelineStage> stages;
    for (int stage = 0; stage < count; ++stage) {
      if (schedule.rank_of_stage[static_cast<size_t>(stage)] != mesh.coordinate("pp")) continue;
      const auto parameters = parameters_of(stage, count, offset);
      stages.emplace_back(function_of(stage, count, parameters), parameters,
                          PipelineStageOptions{.stage = stage, .num_stages = count});
    }
    PipelineOptions options{.schedule = schedule};
    if (given.is_sharded) options.shards = mesh["dp"];
    pipeline_.emplace(stages, mesh["pp"], options);
    pipeline_->tie_parameters({{0, "tokens"}, {count - 1, "tokens"}});
    optimizer_.emplace(pipeline_->parameters(), torch::optim::AdamWOptions(0.01));
  }

  void step(int number) {
    const Tensor tokens = (torch::arange(16, torch::kLong) * 5 + number).remainder(kWords);
    optimizer_->zero_grad();
    pipeline_->step(tokens.view({4, 4}), tokens.roll(1).view({4, 4}),
                    [](const Tensor& logits, const Tensor& target) {
                      return torch::nn::functional::cross_entropy(logits.reshape({-1, kWords}),
                                                                  target.reshape({-1}));
                    });
    optimizer_->step();
    pipeline_->check_tied_parameters();
  }

  SnapshotParts parts() const {
    SnapshotParts parts = parts_of(pipeline_->parameter_shards());
    parts.optimizer = state_dict(*optimizer_, parts.parameters);
    return parts;
  }

  void load(const std::string& path, const ProcessGroup& world) {
    const SnapshotParts parts = parts_of(pipeline_->parameter_shards());
    const LoadedSnapshot loaded = load_sharded(path, parts, world);
    load_state_dict(*optimizer_, parts.parameters, loaded.optimizer);
    pipeline_->check_tied_parameters();
  }

  // Returns the whole parameters on all ranks.
  std::vector<NamedTensor> values() const {
    const auto records = pipeline_->parameter_shards();
    return shard::gather_values(records);
  }

 private:
  std::optional<Pipeline> pipeline_;
  std::optional<torch::optim::AdamW> optimizer_;
};

void require_equal(const std::vector<NamedTensor>& given, const std::vector<NamedTensor>& expected,
                   const std::string& what) {
  require(given.size() == expected.size(), what + ": the number of tensors differs");
  for (size_t i = 0; i < given.size(); ++i) {
    require(given[i].name == expected[i].name, what + ": the names differ");
    require(torch::equal(given[i].tensor, expected[i].tensor), what + ": " + given[i].name);
  }
}

// Loads the snapshot in one process, whose model has the tied weight once.
void load_alone(const std::string& path, const std::vector<NamedTensor>& saved) {
  SnapshotParts plain;
  for (const NamedTensor& named : saved) {
    if (std::ranges::count(plain.parameters, named.name, &SnapshotTensor::name) > 0) continue;
    plain.parameters.push_back(whole_tensor(named.name, torch::zeros_like(named.tensor)));
  }
  load_sharded(path, plain);
  for (const NamedTensor& named : saved) {
    const auto& loaded = *std::ranges::find(plain.parameters, named.name, &SnapshotTensor::name);
    EXPECT_TRUE(torch::equal(loaded.values, named.tensor)) << named.name;
  }
}

class TiedSnapshots : public ::testing::TestWithParam<TiedCase> {};

TEST_P(TiedSnapshots, TrainingGoesOnFromASnapshot) {
  const testing::TemporaryFolder folder;
  std::vector<NamedTensor> saved;
  const auto result = testing::run_groups(4, [&](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}});
    TiedRank rank(GetParam(), mesh, 0);
    for (int step = 0; step < kSavedAfter; ++step) rank.step(step);
    SnapshotSaver saver(SnapshotFolder(folder.path()), world);
    saver.save(kSavedAfter, rank.parts());
    saver.close();
    const auto values = rank.values();
    if (world.rank() == 0) saved = values;
    TiedRank other(GetParam(), mesh, 50);
    other.load(*SnapshotFolder(folder.path()).latest(), world);
    require_equal(other.values(), values, "loaded");
    rank.step(kSavedAfter);
    other.step(kSavedAfter);
    require_equal(other.values(), rank.values(), "parameters differ after the next step");
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  load_alone(*SnapshotFolder(folder.path()).latest(), saved);
}

INSTANTIATE_TEST_SUITE_P(Schedules, TiedSnapshots,
                         ::testing::Values(TiedCase{"1f1b", 1, true}, TiedCase{"zb-v", 2, false},
                                           TiedCase{"zb-v", 2, true},
                                           TiedCase{"interleaved-1f1b", 2, true}),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace cadre
