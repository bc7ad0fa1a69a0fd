// Trains the decoder of axes_model.h on ranks as threads, on a mesh of any axes, and in one process
// with libtorch's loss and clipping.
//
// Threads: one for each rank. Blocking: until all ranks have ended. Errors: a rank that fails fails
// the test.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/schedule/generate.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/ep/expert_parallel.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/layers/vocab_parallel_cross_entropy.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/parallel/shard/data_strategy.h"
#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/parallel/tp/parallelize_module.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/mesh/data_ranks.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/axes_model.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/wrap_bounds.h"
#include "cadre/testing/torch/wrap_training.h"
#include "cadre/train/checkpoint/snapshot_parts.h"
#include "cadre/train/verify/stepped_training.h"

namespace cadre::testing {

inline constexpr int64_t kAxesRows = 8;
// The maximum norm for clipping. It is so small that every step clips its gradients.
inline constexpr double kAxesMaxNorm = 0.25;
inline constexpr RouterLossWeights kAxesRouterWeights{.load_balance = 0.1, .z = 0.02};

// Describes how a model is divided among the ranks.
struct Layout {
  std::string name;
  std::vector<MeshAxis> axes;
  DataStrategy sharding = DataStrategy::kDdp;
  AxesGptKind kind = {};
  std::string schedule = "1f1b";
  int num_microbatches = 2;
  int stages_per_rank = 1;

  bool has(const std::string& axis) const {
    return std::ranges::find(axes, axis, &MeshAxis::name) != axes.end();
  }
  int num_ranks() const {
    int product = 1;
    for (const MeshAxis& axis : axes) product *= axis.size;
    return product;
  }
};

inline std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  return out << layout.name;
}

// Mistakes that the training of a test makes deliberately, on all ranks. The tests must detect each
// of them as a deviation.
enum class AxesMistake {
  kNone,
  kNoSumOverTp,  // layer norms on sequence shards: their gradients are not summed over tp
  kNoSumOverDp,  // the data-parallel wrapper, or the replicas of the pipeline, are left out
  kUntied,       // the gradients of the copies of a tied weight are not summed
  kSwappedMicrobatches,
  kCountedTwice,  // the norm counts a replicated parameter once for each rank of tp
};

// The results of all steps, assembled from all ranks, with the gradient norms.
struct AxesTraining {
  Training training;
  std::vector<double> norms;
};

inline std::vector<Tensor> axes_batches(int num_steps) {
  torch::manual_seed(99);
  std::vector<Tensor> batches;
  for (int step = 0; step < num_steps; ++step) {
    batches.push_back(torch::randint(kVocabulary, {kAxesRows, AxesGpt::kTokens}, torch::kLong));
  }
  return batches;
}

inline AxesTraining train_axes_alone(const Case& test_case, AxesGpt& model,
                                     const std::vector<Tensor>& batches) {
  AxesTraining result;
  const std::vector<Tensor> parameters = parameters_of(model);
  const auto optimizer = make_optimizer(test_case, parameters);
  for (const Tensor& batch : batches) {
    ++model.stream->step;
    optimizer->zero_grad();
    Tensor loss = nn::functional::cross_entropy(model.forward(batch).reshape({-1, kVocabulary}),
                                                axes_targets(batch).reshape({-1}));
    if (model.kind.has_experts) loss = loss + model.router_losses.weighted(kAxesRouterWeights);
    loss.backward();
    result.norms.push_back(nn::utils::clip_grad_norm_(parameters, kAxesMaxNorm));
    result.training.losses.push_back(loss.item<double>());
    std::vector<Tensor> gradients;
    for (const Tensor& parameter : parameters) gradients.push_back(parameter.grad());
    result.training.gradients.push_back(copies_of(gradients));
    optimizer->step();
  }
  result.training.parameters = copies_of(parameters);
  return result;
}

// One rank that trains on `batches` in a layout: divides the model, wraps it (or makes a pipeline)
// and makes the optimizer.
class AxesRank final : public verify::SteppedTraining {
 public:
  AxesRank(const Layout& layout, const Case& test_case, const ProcessGroup& world,
           const AxesGpt& whole, const std::vector<Tensor>& batches,
           AxesMistake mistake = AxesMistake::kNone)
      : layout_(layout),
        mistake_(mistake),
        batches_(batches),
        names_(parameter_names_of(whole)),
        world_(world),
        mesh_(world, with_tp(layout.axes)),
        data_(data_ranks(mesh_)) {
    make_parts(whole);
    for (const auto& part : parts_) divide(*part);
    if (layout.has("pp")) {
      make_pipeline();
    } else {
      wrap();
    }
    make_optimizer_for(test_case);
  }

  // Runs forward and backward and clips the gradients, which remain set. Returns the mean loss over
  // all rows.
  double backward(int64_t step) override {
    optimizer_->zero_grad();
    for (const auto& part : parts_) {
      part->stream->step = static_cast<uint64_t>(step);
      part->stream->first_sample = first_row();
    }
    const Tensor own = batches_[static_cast<size_t>(step - 1)].narrow(0, first_row(), num_rows());
    const Tensor loss = pipeline_ ? step_of_pipeline(own) : step_of_module(own);
    sum_gradients();
    if (before_clip_) before_clip_();
    norms_.push_back(clip());
    return data_.mean(loss).item<double>();
  }
  std::vector<NamedTensor> gradients() override {
    return shard::gather_gradients(gradient_records(), world_);
  }
  void update(int64_t /*step*/) override { optimizer_->step(); }
  std::vector<NamedTensor> parameters() override {
    if (pipeline_ && !has_mistake(AxesMistake::kUntied)) pipeline_->check_tied_parameters();
    return shard::gather_values(records());
  }

  // Gathers and returns the whole parameters, in the order of the plain module.
  Snapshot whole_parameters() { return in_order(names_, parameters()); }

  AxesTraining train() {
    AxesTraining result{.training = train_in_steps(*this, names_, batches_.size())};
    result.norms = norms_;
    return result;
  }

  // Returns the ParameterShards of this rank, for snapshots.
  std::vector<ParameterShard> records() {
    if (pipeline_) return pipeline_->parameter_shards();
    if (fsdp_) return fsdp_->parameter_shards();
    if (zero_records_) return zero_records_();
    return shards_;
  }
  SnapshotParts parts() { return parts_of(records()); }
  // Returns the optimizer that holds the state of the parameters in records().
  torch::optim::Optimizer& optimizer() { return zero_local_ ? zero_local_() : *optimizer_; }
  // Sets hooks: in_forward and in_backward of this rank's first stage, and before_clip, which runs
  // before the gradients are clipped.
  void disturb(std::function<void()> in_forward, std::function<void()> in_backward,
               std::function<void()> before_clip) {
    parts_[0]->in_forward = std::move(in_forward);
    parts_[0]->in_backward = std::move(in_backward);
    before_clip_ = std::move(before_clip);
  }
  // Closes the mesh. After an error the destructor of the mesh does that.
  void close() override { mesh_.close(); }

 private:
  static std::vector<MeshAxis> with_tp(std::vector<MeshAxis> axes) {
    if (std::ranges::find(axes, "tp", &MeshAxis::name) == axes.end()) axes.push_back({"tp", 1});
    return axes;
  }
  int64_t num_rows() const { return kAxesRows / data_.size; }
  int64_t first_row() const { return num_rows() * data_.rank; }

  // Returns those of the named axes that the layout has.
  std::vector<std::string> axes_among(const std::vector<std::string>& names) const {
    std::vector<std::string> present;
    for (const std::string& name : names) {
      if (layout_.has(name)) present.push_back(name);
    }
    return present;
  }
  std::vector<std::string> data_axes() const {
    return axes_among({"dp", "dp_replicate", "dp_shard"});
  }
  // Returns the axes along which the wrapper already reduces gradients; empty without a wrapper.
  std::vector<std::string> reduced_axes() const {
    return ddp_ || fsdp_ ? data_axes() : std::vector<std::string>();
  }
  bool has_mistake(AxesMistake mistake) const { return mistake_ == mistake; }

  void make_parts(const AxesGpt& whole) {
    if (!layout_.has("pp")) {
      parts_.push_back(stage_of(whole, 0, 1));
      return;
    }
    schedule_ = make_pipeline_schedule({.kind = find_pipeline_schedule(layout_.schedule)->kind,
                                        .num_ranks = mesh_.size("pp"),
                                        .num_microbatches = layout_.num_microbatches,
                                        .stages_per_rank = layout_.stages_per_rank})
                    .value_or_throw();
    for (int stage = 0; stage < schedule_.num_stages(); ++stage) {
      if (schedule_.rank_of_stage[static_cast<size_t>(stage)] != mesh_.coordinate("pp")) continue;
      parts_.push_back(stage_of(whole, stage, schedule_.num_stages()));
    }
  }

  void divide(AxesGpt& part) {
    std::vector<PlanEntry> plan = part.plan();
    for (PlanEntry& entry : plan) {
      if (has_mistake(AxesMistake::kNoSumOverTp) && entry.pattern == "norm") {
        entry.style = ParallelStyle::kReplicated;
      }
    }
    const auto records = parallelize_module(part, mesh_["tp"], plan);
    shards_.insert(shards_.end(), records.begin(), records.end());
    if (layout_.has("cp")) {
      context_ = ContextParallel(mesh_.group("cp"), {.num_tokens = AxesGpt::kTokens});
      part.context = context_;
      if (part.has_block()) set_context_parallel(part, *context_);
      token_group_ = context_->group();
    }
    if (layout_.has("ep")) {
      const std::vector<std::string> axes = axes_among({"dp", "dp_shard", "ep", "cp"});
      experts_.emplace(part, mesh_.slice(axes));
      token_group_ = mesh_.joint_group(axes);
      shards_ = experts_->parameter_shards();
    }
  }

  void wrap() {
    const auto& part = parts_[0];
    if (data_axes().empty() || has_mistake(AxesMistake::kNoSumOverDp)) return;
    if (has_units(layout_.sharding)) {
      fully_shard(part->first);
      fully_shard(part->second);
      FullyShardedDataParallelOptions options;
      if (experts_) options.weighting = GradientWeighting::kSum;
      fsdp_ = std::make_unique<FullyShardedDataParallel<AxesGpt>>(part, mesh_.slice(data_axes()),
                                                                  options);
      return;
    }
    DistributedDataParallelOptions options;
    if (experts_) options.weighting = GradientWeighting::kSum;
    ddp_ = std::make_unique<DistributedDataParallel<AxesGpt>>(part, mesh_.joint_group(data_axes()),
                                                              options);
  }

  void make_pipeline() {
    std::vector<PipelineStage> stages;
    for (const auto& part : parts_) {
      stages.emplace_back(
          part, PipelineStageOptions{.stage = part->stage, .num_stages = schedule_.num_stages()});
    }
    PipelineOptions options{.schedule = schedule_};
    if (!data_axes().empty() && has_units(layout_.sharding)) {
      options.shards = mesh_.slice(data_axes());
    } else if (!data_axes().empty() && !has_mistake(AxesMistake::kNoSumOverDp)) {
      options.replicas = mesh_.joint_group(data_axes());
    }
    options.before_microbatch = [this](const PipelineMicrobatch& microbatch) {
      for (const auto& part : parts_) {
        part->stream->first_sample = first_row() + microbatch.first_row;
      }
    };
    pipeline_ = std::make_unique<Pipeline>(stages, mesh_["pp"], options);
    const int last = schedule_.num_stages() - 1;
    if (layout_.kind.is_tied && last > 0 && !has_mistake(AxesMistake::kUntied)) {
      pipeline_->tie_parameters({{0, "tokens.weight"}, {last, "tokens.weight"}});
    }
  }

  void make_optimizer_for(const Case& test_case) {
    if (layout_.sharding == DataStrategy::kZero1) {
      if (test_case.optimizer == "sgd") {
        make_zero<torch::optim::SGD>(sgd_options());
      } else {
        make_zero<torch::optim::AdamW>(adamw_options());
      }
      return;
    }
    optimizer_ = make_optimizer(test_case, trained());
  }

  template <typename O, typename Options>
  void make_zero(const Options& options) {
    auto zero = std::make_unique<ZeroRedundancyOptimizer<O>>(*ddp_, options);
    zero_local_ = [raw = zero.get()]() -> torch::optim::Optimizer& {
      return raw->local_optimizer();
    };
    zero_records_ = [raw = zero.get()] { return raw->parameter_shards(); };
    optimizer_ = std::move(zero);
  }

  // Returns the tensors that the optimizer updates.
  std::vector<Tensor> trained() const {
    if (pipeline_) return pipeline_->parameters();
    if (fsdp_) return fsdp_->parameters();
    return parameters_of(*parts_[0]);
  }

  // Returns the loss of this rank's rows. If the sequence is divided (context parallelism), it is
  // the loss of this rank's tokens in these rows.
  Tensor loss_of(const Tensor& logits, const Tensor& whole_targets) const {
    const Tensor targets = context_ ? context_->shard(whole_targets, 1) : whole_targets;
    const Tensor mean =
        vocab_parallel_cross_entropy(logits, targets, mesh_.group("tp"),
                                     {.vocabulary = kVocabulary, .token_group = token_group_});
    return experts_ ? mean + parts_[0]->router_losses.weighted(kAxesRouterWeights) : mean;
  }

  Tensor step_of_module(const Tensor& own) {
    const Tensor logits = fsdp_  ? fsdp_->forward(own)
                          : ddp_ ? ddp_->forward(own)
                                 : parts_[0]->forward(own);
    const Tensor loss = loss_of(logits, axes_targets(own));
    loss.backward();
    return loss;
  }

  Tensor step_of_pipeline(const Tensor& own) {
    Tensor targets = axes_targets(own);
    if (has_mistake(AxesMistake::kSwappedMicrobatches)) {
      targets = targets.roll(num_rows() / layout_.num_microbatches, 0);
    }
    const PipelineResult result = pipeline_->step(
        own, targets,
        [this](const Tensor& logits, const Tensor& target) { return loss_of(logits, target); },
        {.broadcast_losses = true});
    return result.loss;
  }

  // Sums the gradients that no wrapper reduces, over the ranks of expert or context parallelism.
  void sum_gradients() {
    if (experts_) {
      experts_->sum_gradients(gradient_records(), {.reduced_axes = reduced_axes()});
    } else if (context_) {
      context_->sum_gradients(trained());
    }
  }

  // Returns the norm of all gradients before they are clipped.
  double clip() {
    if (has_mistake(AxesMistake::kCountedTwice)) return norm_of_all_ranks();
    const std::vector<ParameterShard> records = gradient_records();
    return clip_grad_norm_(std::span<const ParameterShard>(records), kAxesMaxNorm);
  }

  double norm_of_all_ranks() {
    double sum = 0;
    for (const ParameterShard& record : gradient_records()) {
      if (record.values.grad().defined()) sum += record.values.grad().square().sum().item<double>();
    }
    const Tensor of_all = torch::full({1}, sum, torch::kDouble);
    mesh_.group("tp").all_reduce(of_all);
    const double norm = of_all.sqrt().item<double>();
    const double factor = std::min(1.0, kAxesMaxNorm / (norm + 1e-6));
    for (const ParameterShard& record : gradient_records()) {
      if (record.values.grad().defined()) record.values.grad().mul_(factor);
    }
    return norm;
  }

  std::vector<ParameterShard> gradient_records() { return zero_records_ ? shards_ : records(); }

  Layout layout_;
  AxesMistake mistake_;
  std::vector<Tensor> batches_;
  std::vector<std::string> names_;  // the names of the parameters in the plain module
  ProcessGroup world_;
  DeviceMesh mesh_;
  DataRanks data_;
  PipelineSchedule schedule_;
  std::vector<std::shared_ptr<AxesGpt>> parts_;
  std::vector<ParameterShard> shards_;
  std::optional<ContextParallel> context_;
  std::optional<ExpertParallel> experts_;
  std::optional<ProcessGroup> token_group_;
  std::unique_ptr<DistributedDataParallel<AxesGpt>> ddp_;
  std::unique_ptr<FullyShardedDataParallel<AxesGpt>> fsdp_;
  std::unique_ptr<Pipeline> pipeline_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<double> norms_;
  std::function<void()> before_clip_;
  std::function<torch::optim::Optimizer&()> zero_local_;
  std::function<std::vector<ParameterShard>()> zero_records_;
};

}  // namespace cadre::testing
