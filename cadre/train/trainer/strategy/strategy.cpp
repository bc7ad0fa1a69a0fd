#include "cadre/train/trainer/strategy/strategy.h"

#include <torch/optim/optimizer.h>

#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/hooks/autograd_hooks.h"
#include "cadre/tensor/hooks/gradient_norm.h"
#include "cadre/train/trainer/models/gpt.h"
#include "cadre/train/trainer/strategy/model_division.h"
#include "cadre/train/trainer/strategy/optimizer.h"
#include "cadre/train/trainer/strategy/pipelined.h"
#include "cadre/train/trainer/tasks/task.h"

namespace cadre::train {
namespace {

template <typename Wrapper>
void set_guard(std::optional<NoSync>& guard, bool on, Wrapper& wrapper) {
  if (!on) {
    guard.reset();
  } else if (!guard) {
    guard.emplace(wrapper.no_sync({.losses_are_weighted = true}));
  }
}

// Runs the backward. If it throws, releases the autograd graph, which libtorch would otherwise
// keep: its nodes hold groups of the run, which must be closed with the run even if the process
// continues.
void run_backward(const at::Tensor& loss) {
  try {
    loss.backward();
  } catch (...) {
    wrap::release_failed_backward();
    throw;
  }
}

// The strategy "single": one process with the plain model.
class Single final : public ForwardStrategy {
 public:
  Single(std::shared_ptr<Model> model, const OptimizerChoice& choice)
      : model_(std::move(model)),
        optimizer_(make_optimizer(stepped_parameters(*model_, choice), choice.config)) {}

  at::Tensor forward(const at::Tensor& data, int64_t /*num_samples*/) override {
    return model_->forward(data);
  }
  at::Tensor infer(const at::Tensor& data) override { return model_->forward(data); }
  void set_accumulating(bool /*on*/) override {}
  void set_training(bool on) override { model_->train(on); }
  void set_rows(const SampledRows& rows) override { model_->set_rows(rows); }
  Model& model() override { return *model_; }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  double clip_gradients(double max_norm) override {
    return clip_grad_norm_(model_->parameters(), max_norm);
  }
  SnapshotParts parts() const override { return parts_of(*model_); }

 private:
  std::shared_ptr<Model> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

// The common base of ddp, zero1 and zero2: each rank has a replica of the whole model.
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
  double clip_gradients(double max_norm) override {
    return clip_grad_norm_(model_.parameters(), max_norm);
  }
  SnapshotParts parts() const override { return parts_of(*model_.module()); }
  std::optional<BucketLayout> learned_layout() const override { return model_.learned_layout(); }

 protected:
  DistributedDataParallel<Model> model_;

 private:
  GradientWeighting weighting_;
  std::optional<NoSync> no_sync_;
};

class Ddp final : public Replicated {
 public:
  Ddp(const std::shared_ptr<Model>& model, const ProcessGroup& group,
      const DistributedDataParallelOptions& options, const OptimizerChoice& choice)
      : Replicated(model, group, options),
        optimizer_(make_optimizer(stepped_parameters(*model, choice), choice.config)) {}

  torch::optim::Optimizer& optimizer() override { return *optimizer_; }

 private:
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

// Implements zero1 and zero2: each rank updates its shard of the parameters and receives the other
// shards from their owners.
template <typename O>
class Zero final : public Replicated {
 public:
  template <typename Options>
  Zero(const std::shared_ptr<Model>& model, const ProcessGroup& group,
       const DistributedDataParallelOptions& wrapping, const SteppedParameters& parameters,
       const Options& options)
      : Replicated(model, group, wrapping),
        // infer() calls the model directly, without the wrapper that would wait for the new
        // parameters, so step() must wait for them.
        optimizer_(model_, groups_of(parameters, options), Options(options.lr()),
                   {.wait_in_step = true}) {}

  torch::optim::Optimizer& optimizer() override { return optimizer_; }
  torch::optim::Optimizer& local_optimizer() override { return optimizer_.local_optimizer(); }
  std::vector<ParameterShard> gradient_shards() const override {
    if (optimizer_.stage() == ZeroStage::kShardedGradients) return owned_shards();
    return {};
  }
  std::vector<ParameterShard> owned_shards() const override {
    return optimizer_.parameter_shards();
  }
  double clip_gradients(double max_norm) override {
    return optimizer_.stage() == ZeroStage::kShardedGradients
               ? clip_grad_norm_(model_, max_norm)
               : Replicated::clip_gradients(max_norm);
  }
  SnapshotParts parts() const override { return parts_of(owned_shards(), *model_.module()); }
  bool holds_parts() const override { return true; }

 private:
  ZeroRedundancyOptimizer<O> optimizer_;
};

at::ScalarType dtype_of(const std::string& name) {
  return to_scalar_type(parse_dtype(name).value());
}

// Gradients of a model with experts are summed over the ranks, because the loss of each rank is
// already divided by the number of tokens of all ranks.
GradientWeighting weighting_of(const Config& config) {
  return config.model.experts > 0 ? GradientWeighting::kSum : GradientWeighting::kSamples;
}

FullyShardedDataParallelOptions sharding_options(const Config& whole, const c10::Device& device) {
  const ParallelConfig& config = whole.parallel;
  FullyShardedDataParallelOptions options;
  if (!device.is_cpu()) options.device = device;
  options.weighting = weighting_of(whole);
  options.form = shard_form(config);
  if (config.offload != "none") options.offload = FileOffload{.folder = config.offload};
  options.reshard = reshard_of(config);
  if (config.parameter_dtype != "float32") {
    options.precision = {.parameters = dtype_of(config.parameter_dtype), .outputs = at::kFloat};
  }
  if (config.reduce_dtype != config.parameter_dtype) {
    options.precision.reduce = dtype_of(config.reduce_dtype);
  }
  options.wrap_policy = [](const WrapCandidate& module) { return module.is_shard_unit; };
  return options;
}

class FullySharded final : public ForwardStrategy {
 public:
  template <typename Ranks>
  FullySharded(const std::shared_ptr<Model>& model, const Ranks& ranks, const Config& config,
               const OptimizerChoice& choice, const c10::Device& device)
      : model_(model, ranks, sharding_options(config, device)), weighting_(weighting_of(config)) {
    const SteppedParameters parameters = stepped_parameters(model_.parameter_shards(), choice);
    optimizer_ =
        with_optimizer(choice.config, parameters.device(),
                       [&]<typename O, typename Options>(
                           std::type_identity<O>,
                           const Options& options) -> std::unique_ptr<torch::optim::Optimizer> {
                         return std::make_unique<ShardedOptimizer<O>>(
                             model_, groups_of(parameters, options), Options(options.lr()));
                       });
  }

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
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<ParameterShard> gradient_shards() const override { return model_.parameter_shards(); }
  double clip_gradients(double max_norm) override { return clip_grad_norm_(model_, max_norm); }
  SnapshotParts parts() const override {
    return parts_of(model_.parameter_shards(), *model_.module());
  }
  bool holds_parts() const override { return true; }

 private:
  FullyShardedDataParallel<Model> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  GradientWeighting weighting_;
  std::optional<NoSync> no_sync_;
};

// Makes ddp, zero1 or zero2 for the ranks that have different rows; makes "single" if that is one
// rank.
std::unique_ptr<ForwardStrategy> make_data_strategy(const Config& config,
                                                    const std::shared_ptr<Model>& model,
                                                    const ProcessGroup& group,
                                                    std::optional<BucketLayout> buckets,
                                                    const OptimizerChoice& choice) {
  const DataStrategy strategy = data_strategy(config.parallel);
  DistributedDataParallelOptions options = {.weighting = weighting_of(config),
                                            .layout = std::move(buckets)};
  if (strategy == DataStrategy::kZero2) options.gradients = GradientPlacement::kSharded;
  if (strategy != DataStrategy::kZero1 && strategy != DataStrategy::kZero2) {
    return std::make_unique<Ddp>(model, group, options, choice);
  }
  const SteppedParameters parameters = stepped_parameters(*model, choice);
  return with_optimizer(
      choice.config, parameters.device(),
      [&]<typename O, typename Options>(
          std::type_identity<O>, const Options& of_steps) -> std::unique_ptr<ForwardStrategy> {
        return std::make_unique<Zero<O>>(model, group, options, parameters, of_steps);
      });
}

// Tensor, context and expert parallelism inside each replica, and a data-parallel strategy between
// the replicas. The processes of a replica have parts of the layers, tokens of the same rows, or
// experts and rows of their own.
class Divided final : public ForwardStrategy {
 public:
  // `replicas` is the strategy between the replicas of the divided model.
  Divided(std::unique_ptr<ForwardStrategy> replicas, ModelDivision division);

  at::Tensor forward(const at::Tensor& data, int64_t num_samples) override;
  at::Tensor infer(const at::Tensor& data) override;
  void set_training(bool on) override { replicas_->set_training(on); }
  void set_accumulating(bool on) override { replicas_->set_accumulating(on); }
  void set_rows(const SampledRows& rows) override { replicas_->set_rows(rows); }
  Model& model() override { return replicas_->model(); }
  bool has_whole_model() const override { return false; }
  std::vector<ParameterShard> gradient_shards() const override;
  std::vector<ParameterShard> owned_shards() const override;
  double clip_gradients(double max_norm) override;
  torch::optim::Optimizer& optimizer() override { return replicas_->optimizer(); }
  torch::optim::Optimizer& local_optimizer() override { return replicas_->local_optimizer(); }
  SnapshotParts parts() const override { return division_.snapshot_parts(owned_shards()); }
  bool holds_parts() const override { return true; }
  std::optional<BucketLayout> learned_layout() const override {
    return replicas_->learned_layout();
  }

 protected:
  at::Tensor loss(const Task& task, const at::Tensor& output,
                  const at::Tensor& target) const override;
  double share_of_step(int64_t num_rows, int64_t num_samples) const override {
    return division_.share_of_step(num_rows, num_samples);
  }
  void finish_gradients() override;

 private:
  std::unique_ptr<ForwardStrategy> replicas_;
  ModelDivision division_;
};

Divided::Divided(std::unique_ptr<ForwardStrategy> replicas, ModelDivision division)
    : replicas_(std::move(replicas)), division_(std::move(division)) {}

at::Tensor Divided::forward(const at::Tensor& data, int64_t num_samples) {
  return replicas_->forward(data, num_samples);
}

at::Tensor Divided::infer(const at::Tensor& data) {
  return division_.whole_logits(replicas_->infer(division_.padded(data)), data.size(1));
}

std::vector<ParameterShard> Divided::gradient_shards() const {
  const std::vector<ParameterShard> shards = replicas_->gradient_shards();
  return shards.empty() ? division_.records() : shards;
}

std::vector<ParameterShard> Divided::owned_shards() const {
  const std::vector<ParameterShard> shards = replicas_->owned_shards();
  return shards.empty() ? division_.records() : shards;
}

double Divided::clip_gradients(double max_norm) {
  const std::vector<ParameterShard> shards = gradient_shards();
  return clip_grad_norm_(std::span<const ParameterShard>(shards), max_norm);
}

at::Tensor Divided::loss(const Task& /*task*/, const at::Tensor& output,
                         const at::Tensor& target) const {
  return division_.loss(output, target);
}

void Divided::finish_gradients() {
  division_.sum_gradients(gradient_shards());
}

// Makes the strategy of a model that is divided among the processes of a replica, or whose tokens
// are sent to experts on other processes.
std::unique_ptr<Strategy> make_divided_strategy(const Config& config,
                                                const std::shared_ptr<Model>& model,
                                                const RunLayout& layout,
                                                std::optional<BucketLayout> buckets) {
  const auto gpt = std::dynamic_pointer_cast<Gpt>(model);  // check_layout() guarantees a Gpt
  const OptimizerChoice choice(config.optimizer, *gpt);
  if (layout.degrees.pipeline > 1) return std::make_unique<Pipelined>(config, *gpt, layout, choice);
  const ParallelConfig& parallel = config.parallel;
  ModelDivision division(*gpt, {gpt}, layout, config);
  std::unique_ptr<ForwardStrategy> replicas;
  if (has_units(data_strategy(parallel))) {
    const DeviceMesh shards = layout.mesh->slice(data_axis_names(parallel));
    replicas = std::make_unique<FullySharded>(model, shards, config, choice, layout.device);
  } else {
    replicas =
        make_data_strategy(config, model, layout.mesh->group("dp"), std::move(buckets), choice);
  }
  return std::make_unique<Divided>(std::move(replicas), std::move(division));
}

}  // namespace

std::unique_ptr<Strategy> make_strategy(const Config& config, const std::shared_ptr<Model>& model,
                                        const RunLayout& layout,
                                        std::optional<BucketLayout> buckets) {
  if (layout.mesh) return make_divided_strategy(config, model, layout, std::move(buckets));
  const ParallelConfig& parallel = config.parallel;
  const OptimizerChoice choice(config.optimizer, *model);
  const DataStrategy strategy = data_strategy(parallel);
  if (strategy == DataStrategy::kSingle) return std::make_unique<Single>(model, choice);
  if (strategy == DataStrategy::kFsdp) {
    return std::make_unique<FullySharded>(model, layout.world, config, choice, layout.device);
  }
  if (strategy == DataStrategy::kHsdp) {
    return std::make_unique<FullySharded>(model, *layout.replicas, config, choice, layout.device);
  }
  return make_data_strategy(config, model, layout.world, std::move(buckets), choice);
}

void Strategy::step(double learning_rate) {
  set_learning_rate(optimizer(), learning_rate);
  optimizer().step();
}

at::Tensor ForwardStrategy::loss(const Task& task, const at::Tensor& output,
                                 const at::Tensor& target) const {
  return task.loss(output, target);
}

double ForwardStrategy::share_of_step(int64_t num_rows, int64_t num_samples) const {
  return static_cast<double>(num_rows) / static_cast<double>(num_samples);
}

ScalarSum ForwardStrategy::backward(const Task& task, const Batch& batch,
                                    const BackwardOptions& options) {
  const int64_t num_samples = batch.data.size(0);
  ScalarSum mean_loss;
  for (int64_t part = 0; part < options.num_parts; ++part) {
    const int64_t begin = num_samples * part / options.num_parts;
    const int64_t end = num_samples * (part + 1) / options.num_parts;
    const bool is_last = part + 1 == options.num_parts;
    // The last part is never smaller than the others, and its backward reduces the gradients. The
    // forward of a sharded model is collective, so it also runs on ranks whose part has no samples.
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
      run_backward(output.sum() * 0);  // the mean over no samples is NaN
      continue;
    }
    at::Tensor mean =
        with_auxiliary_loss(loss(task, output, batch.target.slice(0, begin, end)), model());
    if (share < 1) mean = mean * share;
    run_backward(mean);
    mean_loss.add(mean);
  }
  mean_loss.begin_copy();
  finish_gradients();
  return mean_loss;
}

}  // namespace cadre::train
