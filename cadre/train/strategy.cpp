#include "cadre/train/strategy.h"

#include <filesystem>
#include <utility>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/zero/zero_core.h"
#include "cadre/shard/shard_fence.h"
#include "cadre/shard/sharded_norm.h"
#include "cadre/train/models/model.h"
#include "cadre/train/tasks/task.h"
#include "cadre/wrap/gradient_norm.h"
#include "cadre/wrap/named_tensors.h"

namespace cadre::train {
namespace {

template <typename Wrapper>
void set_guard(std::optional<reduction::NoSync>& guard, bool on, Wrapper& wrapper) {
  if (!on) {
    guard.reset();
  } else if (!guard) {
    guard.emplace(wrapper.no_sync());
  }
}

// No model registers a tensor twice.
NamedTensors parameters_of(const Model& model) {
  NamedTensors parameters;
  for (const auto& item : model.named_parameters()) {
    parameters.emplace_back(item.key(), item.value());
  }
  return parameters;
}

// One process with the plain model.
class Single final : public Strategy {
 public:
  explicit Single(std::shared_ptr<Model> model) : model_(std::move(model)) {}

  at::Tensor forward(const at::Tensor& data, int64_t /*num_samples*/) override {
    return model_->forward(data);
  }
  at::Tensor infer(const at::Tensor& data) override { return model_->forward(data); }
  void set_accumulating(bool /*on*/) override {}
  std::vector<TrainedTensor> trained() const override {
    return trained_tensors(parameters_of(*model_));
  }
  double clip_gradients(double max_norm) override {
    return clip_grad_norm_(model_->parameters(), max_norm);
  }
  SnapshotParts parts() const override { return parts_of(*model_); }

 private:
  std::shared_ptr<Model> model_;
};

// ddp, and the base of zero1 and zero2.
class Replicated : public Strategy {
 public:
  Replicated(const std::shared_ptr<Model>& model, const ProcessGroup& group,
             const DistributedDataParallelOptions& options)
      : model_(model, group, options) {}

  at::Tensor forward(const at::Tensor& data, int64_t num_samples) override {
    model_.set_num_samples(num_samples);
    return model_.forward(data);
  }
  at::Tensor infer(const at::Tensor& data) override { return model_->forward(data); }
  void set_accumulating(bool on) override { set_guard(no_sync_, on, model_); }
  std::vector<TrainedTensor> trained() const override {
    return trained_tensors(parameters_of(*model_.module()));
  }
  double clip_gradients(double max_norm) override {
    return clip_grad_norm_(model_.parameters(), max_norm);
  }
  SnapshotParts parts() const override { return parts_of(*model_.module()); }
  std::optional<BucketLayout> learned_layout() const override { return model_.learned_layout(); }

 protected:
  DistributedDataParallel<Model> model_;

 private:
  std::optional<reduction::NoSync> no_sync_;
};

std::vector<TrainedTensor> trained_of(const std::vector<ParameterShard>& shards) {
  std::vector<TrainedTensor> trained;
  for (const ParameterShard& shard : shards) {
    trained.push_back({shard.name, shard.values, shard.sizes.size() >= 2});
  }
  return trained;
}

constexpr const char* kOptimizerName = "cadre train";  // in the texts of ZeroCore

std::unique_ptr<parallel::ZeroCore> make_core(const DistributedDataParallel<Model>& model) {
  if (!model.flat_parameters().empty()) {
    return std::make_unique<parallel::ZeroCore>(kOptimizerName, model.flat_parameters(),
                                                model.parameter_shards());
  }
  std::vector<NamedTensor> parameters;
  for (auto& [name, tensor] : parameters_of(*model.module())) parameters.push_back({name, tensor});
  auto core = std::make_unique<parallel::ZeroCore>(kOptimizerName, std::move(parameters),
                                                   model.process_group(), ZeroOptions{});
  core->adopt(model.module()->parameters());
  return core;
}

// zero1 and zero2: each rank updates a shard of the parameters and receives the others from their
// owners.
class DividedOptimizer final : public Replicated {
 public:
  DividedOptimizer(const std::shared_ptr<Model>& model, const ProcessGroup& world,
                   const DistributedDataParallelOptions& options)
      : Replicated(model, world, options),
        core_(make_core(model_)),
        shards_(core_->parameter_shards()) {}

  std::vector<TrainedTensor> trained() const override { return trained_of(shards_); }
  std::vector<ParameterShard> gradient_shards() const override {
    if (core_->stage() == ZeroStage::kShardedGradients) return shards_;
    return {};
  }
  double clip_gradients(double max_norm) override {
    return core_->stage() == ZeroStage::kShardedGradients ? clip_grad_norm_(model_, max_norm)
                                                          : Replicated::clip_gradients(max_norm);
  }
  // The parameters of one buffer are gathered while those of the next are updated, and forwards
  // wait for them.
  void update(const std::function<void()>& step) override {
    core_->begin_step();
    {
      const StepEnd end{*core_};
      for (size_t k = 0; k < core_->buckets().size(); ++k) {
        core_->lend_gradients(k);
        step();
        core_->gather(k);
      }
    }
    core_->finish_gathers();
    // Those of the whole parameters are no tensors of trained().
    for (at::Tensor& parameter : model_.module()->parameters()) parameter.mutable_grad().reset();
  }
  SnapshotParts parts() const override { return parts_of(shards_, *model_.module()); }
  bool holds_parts() const override { return true; }
  void parts_were_filled() override {
    for (size_t k = 0; k < core_->buckets().size(); ++k) core_->gather(k);
    core_->finish_gathers();
  }

 private:
  struct StepEnd {
    parallel::ZeroCore& core;
    ~StepEnd() { core.end_step(); }
  };

  std::unique_ptr<parallel::ZeroCore> core_;
  std::vector<ParameterShard> shards_;
};

c10::ScalarType dtype_of(const std::string& name) {
  return name == "bfloat16" ? at::kBFloat16 : at::kFloat;
}

FullyShardedDataParallelOptions sharding_options(const ParallelConfig& config) {
  FullyShardedDataParallelOptions options;
  options.form = shard_form(config);
  if (config.offload != "none") options.offload = FileOffload{.folder = config.offload};
  options.reshard = config.reshard == "after_forward"    ? Reshard::kAfterForward
                    : config.reshard == "after_backward" ? Reshard::kAfterBackward
                                                         : Reshard::kAfterReduction;
  if (config.parameter_dtype != "float32") {
    options.precision = {.parameters = dtype_of(config.parameter_dtype), .outputs = at::kFloat};
  }
  if (config.reduce_dtype != config.parameter_dtype) {
    options.precision.reduce = dtype_of(config.reduce_dtype);
  }
  options.wrap_policy = [](const WrapCandidate&) { return true; };
  return options;
}

class FullySharded final : public Strategy {
 public:
  template <typename Ranks>
  FullySharded(const std::shared_ptr<Model>& model, const Ranks& ranks,
               const ParallelConfig& config)
      : model_(model, ranks, sharding_options(config)) {}

  at::Tensor forward(const at::Tensor& data, int64_t num_samples) override {
    model_.set_num_samples(num_samples);
    return model_.forward(data);
  }
  at::Tensor infer(const at::Tensor& data) override { return model_.forward(data); }
  bool has_whole_model() const override { return false; }
  void set_accumulating(bool on) override { set_guard(no_sync_, on, model_); }
  std::vector<TrainedTensor> trained() const override {
    return trained_of(model_.parameter_shards());
  }
  std::vector<ParameterShard> gradient_shards() const override { return model_.parameter_shards(); }
  double clip_gradients(double max_norm) override { return clip_grad_norm_(model_, max_norm); }
  // Mapped shards are written while no rank reads them.
  void update(const std::function<void()>& step) override {
    ShardUpdate update(model_.shard_fence());
    step();
    update.finish();
  }
  SnapshotParts parts() const override {
    return parts_of(model_.parameter_shards(), *model_.module());
  }
  bool holds_parts() const override { return true; }
  void parts_were_filled() override { const FullParameters full = model_.summon_full_params(); }

 private:
  FullyShardedDataParallel<Model> model_;
  std::optional<reduction::NoSync> no_sync_;
};

std::vector<MeshAxis> hybrid_axes(const ParallelConfig& config, int world_size) {
  const int num_replicas = static_cast<int>(config.replicas);
  return {{"replicate", num_replicas}, {"shard", world_size / num_replicas}};
}

}  // namespace

bool shards_parameters(const ParallelConfig& config) {
  return config.strategy == "fsdp" || config.strategy == "hsdp";
}

void check_strategy(const ParallelConfig& config, int world_size) {
  if (config.strategy == "single" && world_size > 1) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("parallel.strategy is single, which takes one process, but "
                              "there are {} processes: choose ddp, zero1, zero2, fsdp or hsdp, or "
                              "start one process",
                              world_size));
  }
  if (config.strategy == "hsdp" && world_size % config.replicas != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("parallel.replicas is {}, which does not divide the {} processes",
                              config.replicas, world_size));
  }
  if (shards_parameters(config) && config.offload != "none" &&
      !std::filesystem::is_directory(config.offload)) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("parallel.offload: there is no folder {}; make it, or choose none",
                              config.offload));
  }
}

std::unique_ptr<Strategy> make_strategy(const ParallelConfig& config,
                                        const std::shared_ptr<Model>& model,
                                        const ProcessGroup& world,
                                        std::optional<BucketLayout> layout) {
  if (config.strategy == "single") return std::make_unique<Single>(model);
  if (config.strategy == "fsdp") return std::make_unique<FullySharded>(model, world, config);
  if (config.strategy == "hsdp") {
    const DeviceMesh mesh(world, hybrid_axes(config, world.world_size()));
    return std::make_unique<FullySharded>(model, mesh, config);
  }
  DistributedDataParallelOptions options = {.layout = std::move(layout)};
  if (config.strategy == "ddp") return std::make_unique<Replicated>(model, world, options);
  if (config.strategy == "zero2") options.gradients = GradientPlacement::kSharded;
  return std::make_unique<DividedOptimizer>(model, world, options);
}

double backward_in_parts(Strategy& strategy, const Task& task, const Batch& batch,
                         int64_t num_parts, const ForwardPart& forward) {
  const int64_t num_samples = batch.data.size(0);
  double mean_loss = 0;
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t begin = num_samples * part / num_parts;
    const int64_t end = num_samples * (part + 1) / num_parts;
    const bool is_last = part + 1 == num_parts;
    // The last part is the largest, and its backward reduces the gradients. The forward of a
    // sharded model is collective, so it also runs on ranks without a sample.
    const bool is_empty = begin == end;
    if (is_empty && !is_last && strategy.has_whole_model()) continue;
    strategy.set_accumulating(!is_last);
    const at::Tensor output = forward(batch.data.slice(0, begin, end), end - begin);
    if (is_empty) {
      (output.sum() * 0).backward();  // the mean over no sample is NaN
      continue;
    }
    at::Tensor loss = task.loss(output, batch.target.slice(0, begin, end));
    if (end - begin < num_samples) {
      loss = loss * (static_cast<double>(end - begin) / static_cast<double>(num_samples));
    }
    loss.backward();
    mean_loss += loss.item<double>();
  }
  return mean_loss;
}

}  // namespace cadre::train
