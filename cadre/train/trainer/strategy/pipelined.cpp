#include "cadre/train/trainer/strategy/pipelined.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <span>
#include <string>

#include "cadre/parallel/shard/sharded_norm.h"

namespace cadre::train {
namespace {

constexpr const char* kTiedWeight = "wte.weight";

std::vector<std::pair<int, std::shared_ptr<Gpt>>> stages_of(const Gpt& whole,
                                                            const PipelineSchedule& schedule,
                                                            int rank, int64_t num_blocks) {
  std::vector<std::pair<int, std::shared_ptr<Gpt>>> stages;
  const int num_stages = schedule.num_stages();
  const int64_t size = num_blocks / num_stages;
  for (int stage = 0; stage < num_stages; ++stage) {
    if (schedule.rank_of_stage[static_cast<size_t>(stage)] != rank) continue;
    stages.emplace_back(stage,
                        std::make_shared<Gpt>(whole, GptPart{.first_block = size * stage,
                                                             .end_block = size * (stage + 1),
                                                             .has_embeddings = stage == 0,
                                                             .has_head = stage == num_stages - 1}));
  }
  return stages;
}

std::vector<std::shared_ptr<Gpt>> modules_of(
    const std::vector<std::pair<int, std::shared_ptr<Gpt>>>& stages) {
  std::vector<std::shared_ptr<Gpt>> parts;
  for (const auto& [stage, part] : stages) parts.push_back(part);
  return parts;
}

}  // namespace

Pipelined::Pipelined(const Config& config, const Gpt& whole, const RunLayout& layout,
                     const OptimizerChoice& choice)
    : mesh_(*layout.mesh),
      schedule_(pipeline_schedule(config, layout.degrees)),
      vocabulary_(whole.vocabulary()),
      stages_(stages_of(whole, schedule_, mesh_.coordinate("pp"), config.model.layers)),
      division_(whole, modules_of(stages_), layout, config),
      times_(schedule_.num_stages()) {
  make_pipeline(config, layout);
  if (whole.is_tied()) {
    pipeline_->tie_parameters({{0, kTiedWeight}, {schedule_.num_stages() - 1, kTiedWeight}});
  }
  parameters_.emplace(*pipeline_, layout.world);
  optimizer_ = make_optimizer(stepped_parameters(parameters_->records(), choice), choice.config);
}

void Pipelined::make_pipeline(const Config& config, const RunLayout& layout) {
  std::vector<PipelineStage> stages;
  for (const auto& [stage, part] : stages_) {
    stages.emplace_back(part,
                        PipelineStageOptions{.stage = stage, .num_stages = schedule_.num_stages()});
  }
  PipelineOptions options{.schedule = schedule_};
  const std::vector<std::string> axes = data_axis_names(config.parallel);
  if (layout.degrees.data > 1 && has_units(data_strategy(config.parallel))) {
    options.shards = mesh_.slice(axes);
  } else if (layout.degrees.data > 1) {
    options.replicas = mesh_.joint_group(axes);
  }
  options.before_microbatch = [this](const PipelineMicrobatch& microbatch) {
    SampledRows rows = rows_;
    rows.first += microbatch.first_row * rows.stride;
    stages_[0].second->set_rows(rows);  // all stages share one SampledRows
  };
  pipeline_ = std::make_unique<Pipeline>(stages, mesh_["pp"], options);
}

ScalarSum Pipelined::backward(const Task& /*task*/, const Batch& batch,
                              const BackwardOptions& options) {
  rows_ = options.rows;
  const PipelineResult result =
      pipeline_->step(batch.data, batch.target,
                      [this](const at::Tensor& logits, const at::Tensor& target) {
                        return division_.loss(logits, target);
                      },
                      {.broadcast_losses = true});
  times_.add(result.compute_times, schedule_.num_microbatches);
  division_.sum_gradients(pipeline_->parameters());
  return ScalarSum(result.loss.item<double>());
}

// Adds rows until the number of microbatches divides their number.
at::Tensor Pipelined::infer(const at::Tensor& data) {
  const int64_t count = schedule_.num_microbatches;
  const int64_t num_rows = std::max<int64_t>((data.size(0) + count - 1) / count, 1) * count;
  const at::Tensor tokens =
      at::constant_pad_nd(division_.padded(data), {0, 0, 0, num_rows - data.size(0)});
  const PipelineResult result = pipeline_->forward(tokens, {}, {}, {.return_outputs = true});
  const int last = schedule_.rank_of_stage.back();
  const at::Tensor logits =
      mesh_.coordinate("pp") == last
          ? division_.whole_logits(result.outputs[0], data.size(1)).contiguous()
          : at::empty({num_rows, data.size(1), vocabulary_},
                      parameters_->records()[0].values.options());
  mesh_.group("pp").broadcast(logits, {.root = last});
  return logits.narrow(0, 0, data.size(0));
}

std::string Pipelined::summary(const ProcessGroup& world) const {
  const std::vector<StageTime> stages = times_.of_all_processes(world);
  return stages.empty() ? "" : describe(stages);
}

void Pipelined::set_training(bool on) {
  for (const auto& [stage, part] : stages_) part->train(on);
}

double Pipelined::clip_gradients(double max_norm) {
  return clip_grad_norm_(std::span<const ParameterShard>(parameters_->records()), max_norm);
}

void Pipelined::step(double learning_rate) {
  parameters_->prepare_step();
  Strategy::step(learning_rate);
  parameters_->fill_copies();
}

}  // namespace cadre::train
