#include "cadre/train/trainer/strategy/strategy.h"

#include <torch/optim/optimizer.h>

#include <utility>
#include <vector>

#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/shard/shard_fence.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/parallel/zero/zero_core.h"
#include "cadre/tensor/hooks/autograd_hooks.h"
#include "cadre/tensor/hooks/gradient_norm.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/train/trainer/models/gpt.h"
#include "cadre/train/trainer/strategy/divided.h"
#include "cadre/train/trainer/strategy/pipelined.h"
#include "cadre/train/trainer/tasks/task.h"

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

// After a failure, libtorch must not keep the graph: its nodes hold groups of the run, which are to
// end with the run although the process may go on.
void run_backward(const at::Tensor& loss) {
  try {
    loss.backward();
  } catch (...) {
    wrap::release_failed_backward();
    throw;
  }
}

// One process with the plain model.
class Single final : public ForwardStrategy {
 public:
  explicit Single(std::shared_ptr<Model> model) : model_(std::move(model)) {}

  at::Tensor forward(const at::Tensor& data, int64_t /*num_samples*/) override {
    return model_->forward(data);
  }
  at::Tensor infer(const at::Tensor& data) override { return model_->forward(data); }
  void set_accumulating(bool /*on*/) override {}
  void set_training(bool on) override { model_->train(on); }
  void set_rows(const SampledRows& rows) override { model_->set_rows(rows); }
  Model& model() override { return *model_; }
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
class Replicated : public ForwardStrategy {
 public:
  Replicated(const std::shared_ptr<Model>& model, const ProcessGroup& group,
             const DistributedDataParallelOptions& options)
      : model_(model, group, options), weighting_(options.weighting) {}

  at::Tensor forward(const at::Tensor& data, int64_t num_samples) override {
    if (weighting_ == GradientWeighting::kSamples) model_.set_num_samples(num_samples);
    return model_.forward(data);
  }
  at::Tensor infer(const at::Tensor& data) override { return model_->forward(data); }
  void set_accumulating(bool on) override { set_guard(no_sync_, on, model_); }
  void set_training(bool on) override { model_.module()->train(on); }
  void set_rows(const SampledRows& rows) override { model_.module()->set_rows(rows); }
  Model& model() override { return *model_.module(); }
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
  GradientWeighting weighting_;
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

parallel::ZeroCore::Groups groups_of(const Model& model) {
  parallel::ZeroCore::Groups groups;
  groups.emplace_back(model.parameters());
  return groups;
}

std::unique_ptr<parallel::ZeroCore> make_core(const DistributedDataParallel<Model>& model,
                                              const parallel::ZeroCore::Groups& groups) {
  const parallel::ZeroCore::Settings settings{.groups = groups, .defaults = nullptr};
  if (!model.flat_parameters().empty()) {
    return std::make_unique<parallel::ZeroCore>(kOptimizerName, model.flat_parameters(),
                                                model.parameter_shards(), settings);
  }
  std::vector<NamedTensor> parameters;
  for (auto& [name, tensor] : parameters_of(*model.module())) parameters.push_back({name, tensor});
  return std::make_unique<parallel::ZeroCore>(kOptimizerName, std::move(parameters),
                                              model.process_group(), ZeroOptions{}, settings);
}

// zero1 and zero2: each rank updates a shard of the parameters and receives the others from their
// owners.
class DividedOptimizer final : public Replicated {
 public:
  DividedOptimizer(const std::shared_ptr<Model>& model, const ProcessGroup& world,
                   const DistributedDataParallelOptions& options)
      : Replicated(model, world, options),
        groups_(groups_of(*model_.module())),
        core_(make_core(model_, groups_)),
        shards_(core_->parameter_shards()) {}

  std::vector<TrainedTensor> trained() const override { return trained_of(shards_); }
  std::vector<ParameterShard> gradient_shards() const override {
    if (core_->stage() == ZeroStage::kShardedGradients) return shards_;
    return {};
  }
  std::vector<ParameterShard> owned_shards() const override { return shards_; }
  double clip_gradients(double max_norm) override {
    return core_->stage() == ZeroStage::kShardedGradients ? clip_grad_norm_(model_, max_norm)
                                                          : Replicated::clip_gradients(max_norm);
  }
  // The parameters of one buffer are gathered while those of the next are updated, and forwards
  // wait for them.
  void update(const std::function<void()>& step) override {
    core_->begin_step(groups_);
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

  parallel::ZeroCore::Groups groups_;
  std::unique_ptr<parallel::ZeroCore> core_;
  std::vector<ParameterShard> shards_;
};

c10::ScalarType dtype_of(const std::string& name) {
  return name == "bfloat16" ? at::kBFloat16 : at::kFloat;
}

// With experts the loss of each rank is divided by the tokens of all ranks.
GradientWeighting weighting_of(const Config& config) {
  return config.model.experts > 0 ? GradientWeighting::kEqual : GradientWeighting::kSamples;
}

FullyShardedDataParallelOptions sharding_options(const Config& whole) {
  const ParallelConfig& config = whole.parallel;
  FullyShardedDataParallelOptions options;
  options.weighting = weighting_of(whole);
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

class FullySharded final : public ForwardStrategy {
 public:
  template <typename Ranks>
  FullySharded(const std::shared_ptr<Model>& model, const Ranks& ranks, const Config& config)
      : model_(model, ranks, sharding_options(config)), weighting_(weighting_of(config)) {}

  at::Tensor forward(const at::Tensor& data, int64_t num_samples) override {
    if (weighting_ == GradientWeighting::kSamples) model_.set_num_samples(num_samples);
    return model_.forward(data);
  }
  at::Tensor infer(const at::Tensor& data) override { return model_.forward(data); }
  bool has_whole_model() const override { return false; }
  void set_accumulating(bool on) override { set_guard(no_sync_, on, model_); }
  void set_training(bool on) override { model_.module()->train(on); }
  void set_rows(const SampledRows& rows) override { model_.module()->set_rows(rows); }
  Model& model() override { return *model_.module(); }
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
  GradientWeighting weighting_;
  std::optional<reduction::NoSync> no_sync_;
};

// ddp, zero1 and zero2 of the ranks that have different rows; single, if that is one rank.
std::unique_ptr<ForwardStrategy> make_data_strategy(const Config& config,
                                                    const std::shared_ptr<Model>& model,
                                                    const ProcessGroup& group,
                                                    std::optional<BucketLayout> buckets) {
  const std::string& strategy = config.parallel.strategy;
  DistributedDataParallelOptions options = {.weighting = weighting_of(config),
                                            .layout = std::move(buckets)};
  if (strategy == "zero2") options.gradients = GradientPlacement::kSharded;
  if (strategy == "zero1" || strategy == "zero2") {
    return std::make_unique<DividedOptimizer>(model, group, options);
  }
  return std::make_unique<Replicated>(model, group, options);
}

// The processes that have different rows also have different parts of the model, or exchange tokens
// for experts.
std::unique_ptr<Strategy> make_divided_strategy(const Config& config,
                                                const std::shared_ptr<Model>& model,
                                                const RunLayout& layout,
                                                std::optional<BucketLayout> buckets) {
  const auto gpt = std::dynamic_pointer_cast<Gpt>(model);  // as check_layout() has required
  if (layout.degrees.pipeline > 1) return std::make_unique<Pipelined>(config, *gpt, layout);
  const ParallelConfig& parallel = config.parallel;
  ModelDivision division(*gpt, {gpt}, layout, config);
  std::unique_ptr<ForwardStrategy> replicas;
  if (shards_parameters(parallel)) {
    const DeviceMesh shards = layout.mesh->slice(data_axis_names(parallel));
    replicas = std::make_unique<FullySharded>(model, shards, config);
  } else {
    replicas = make_data_strategy(config, model, layout.mesh->group("dp"), std::move(buckets));
  }
  return std::make_unique<Divided>(std::move(replicas), std::move(division));
}

}  // namespace

bool shards_parameters(const ParallelConfig& config) {
  return config.strategy == "fsdp" || config.strategy == "hsdp";
}

std::unique_ptr<Strategy> make_strategy(const Config& config, const std::shared_ptr<Model>& model,
                                        const RunLayout& layout,
                                        std::optional<BucketLayout> buckets) {
  if (layout.mesh) return make_divided_strategy(config, model, layout, std::move(buckets));
  const ParallelConfig& parallel = config.parallel;
  if (parallel.strategy == "single") return std::make_unique<Single>(model);
  if (parallel.strategy == "fsdp") {
    return std::make_unique<FullySharded>(model, layout.world, config);
  }
  if (parallel.strategy == "hsdp") {
    const DeviceMesh mesh(layout.world, data_axes(parallel, layout.degrees));
    return std::make_unique<FullySharded>(model, mesh, config);
  }
  return make_data_strategy(config, model, layout.world, std::move(buckets));
}

at::Tensor ForwardStrategy::loss(const Task& task, const at::Tensor& output,
                                 const at::Tensor& target) const {
  return task.loss(output, target);
}

double ForwardStrategy::share_of_step(int64_t num_rows, int64_t num_samples) const {
  return static_cast<double>(num_rows) / static_cast<double>(num_samples);
}

double ForwardStrategy::backward(const Task& task, const Batch& batch,
                                 const BackwardOptions& options) {
  const int64_t num_samples = batch.data.size(0);
  double mean_loss = 0;
  for (int64_t part = 0; part < options.num_parts; ++part) {
    const int64_t begin = num_samples * part / options.num_parts;
    const int64_t end = num_samples * (part + 1) / options.num_parts;
    const bool is_last = part + 1 == options.num_parts;
    // The last part is the largest, and its backward reduces the gradients. The forward of a
    // sharded model is collective, so it also runs on ranks without a sample.
    const bool is_empty = begin == end;
    if (is_empty && !is_last && has_whole_model()) continue;
    set_accumulating(!is_last);
    SampledRows rows = options.rows;
    rows.first += begin * rows.stride;
    set_rows(rows);
    const auto compute = [&] { return forward(batch.data.slice(0, begin, end), end - begin); };
    const at::Tensor output = options.around_forward ? options.around_forward(compute) : compute();
    const double whole = is_empty ? 0 : 1;
    const double share = options.num_parts == 1 ? whole : share_of_step(end - begin, num_samples);
    if (share == 0) {
      run_backward(output.sum() * 0);  // the mean over no sample is NaN
      continue;
    }
    at::Tensor mean =
        with_auxiliary_loss(loss(task, output, batch.target.slice(0, begin, end)), model());
    if (share < 1) mean = mean * share;
    run_backward(gradient_factor() == 1 ? mean : mean * gradient_factor());
    mean_loss += mean.item<double>();
  }
  finish_gradients();
  return mean_loss;
}

}  // namespace cadre::train
