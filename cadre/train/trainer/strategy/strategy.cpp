#include "cadre/train/trainer/strategy/strategy.h"

#include <torch/optim/optimizer.h>

#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/train/trainer/models/gpt.h"
#include "cadre/train/trainer/strategy/model_division.h"
#include "cadre/train/trainer/strategy/optimizer.h"
#include "cadre/train/trainer/strategy/pipelined.h"
#include "cadre/train/trainer/tasks/task.h"
#include "cadre/train/training/training.h"

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
  options.form = shard_form(config);
  if (config.offload != "none") options.offload = FileOffload{.folder = config.offload};
  options.reshard = reshard_of(config);
  if (config.parameter_dtype != "float32") {
    options.precision = {.parameters = dtype_of(config.parameter_dtype), .outputs = at::kFloat};
  }
  if (config.reduce_dtype != config.parameter_dtype) {
    options.precision.reduce = dtype_of(config.reduce_dtype);
  }
  options.wrap_policy = wrap_shard_units();
  return options;
}

// The strategies single, ddp, zero1, zero2, fsdp and hsdp.
template <typename Options, typename O>
class WholeLayers final : public ForwardStrategy {
 public:
  using Wrapped = Training<Model, Options, O>;

  WholeLayers(const std::shared_ptr<Model>& model, const Ranks& ranks, const Options& optimizer,
              const TrainingOptions& options, const typename Wrapped::Groups& groups)
      : training_(model, optimizer, ranks, options, groups),
        counts_samples_(options.weighting == GradientWeighting::kSamples) {}

  at::Tensor forward(const at::Tensor& data, int64_t num_samples) override {
    if (counts_samples_) {
      training_.with_wrapper([&](auto& wrapper) { wrapper.set_num_samples(num_samples); });
    }
    return training_(data);
  }
  // Calls a whole model without its wrapper, because ranks evaluate different numbers of batches.
  at::Tensor infer(const at::Tensor& data) override {
    return has_whole_model() ? training_->forward(data) : training_(data);
  }
  bool has_whole_model() const override { return !has_units(training_.strategy()); }
  void set_accumulating(bool on) override {
    training_.with_wrapper([&](auto& wrapper) { set_guard(no_sync_, on, wrapper); });
  }
  void set_training(bool on) override { training_.train(on); }
  void set_rows(const SampledRows& rows) override { training_->set_rows(rows); }
  Model& model() override { return *training_.module(); }
  torch::optim::Optimizer& optimizer() override { return training_.optimizer(); }
  torch::optim::Optimizer& local_optimizer() override { return training_.local_optimizer(); }
  std::vector<ParameterShard> gradient_shards() const override {
    if (training_.strategy() == DataStrategy::kZero1) return {};
    return owned_shards();
  }
  std::vector<ParameterShard> owned_shards() const override { return training_.parameter_shards(); }
  double clip_gradients(double max_norm) override { return training_.clip_grad_norm(max_norm); }
  SnapshotParts parts() const override { return training_.parts(); }
  bool holds_parts() const override { return !owned_shards().empty(); }
  std::optional<BucketLayout> learned_layout() const override {
    return training_.with_wrapper([](const auto& wrapper) { return wrapper.learned_layout(); });
  }

 private:
  Wrapped training_;
  bool counts_samples_;
  std::optional<NoSync> no_sync_;
};

// Makes parallel.strategy for the ranks that have different rows; makes "single" if that is one
// rank of a divided model.
std::unique_ptr<ForwardStrategy> make_data_strategy(const Config& config,
                                                    const std::shared_ptr<Model>& model,
                                                    const Ranks& ranks, const RunLayout& layout,
                                                    std::optional<BucketLayout> buckets,
                                                    const OptimizerChoice& choice) {
  TrainingOptions options;
  options.strategy = data_strategy(config.parallel);
  options.weighting = weighting_of(config);
  options.ddp = {.layout = std::move(buckets)};
  options.fsdp = sharding_options(config, layout.device);
  return with_optimizer(
      choice.config, layout.device,
      [&]<typename O, typename Options>(
          std::type_identity<O>, const Options& of_steps) -> std::unique_ptr<ForwardStrategy> {
        Options without_decay = of_steps;
        without_decay.weight_decay(0);
        const auto is_not_decayed = [&choice](const WholeParameter& parameter) {
          return !choice.decayed.contains(parameter.name);
        };
        return std::make_unique<WholeLayers<Options, O>>(
            model, ranks, of_steps, options,
            std::vector{ParameterGroup<Options>{is_not_decayed, without_decay}});
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
  const Ranks replicas = has_units(data_strategy(parallel))
                             ? Ranks(layout.mesh->slice(data_axis_names(parallel)))
                             : Ranks(layout.mesh->group("dp"));
  return std::make_unique<Divided>(
      make_data_strategy(config, model, replicas, layout, std::move(buckets), choice),
      std::move(division));
}

}  // namespace

std::unique_ptr<Strategy> make_strategy(const Config& config, const std::shared_ptr<Model>& model,
                                        const RunLayout& layout,
                                        std::optional<BucketLayout> buckets) {
  if (layout.mesh) return make_divided_strategy(config, model, layout, std::move(buckets));
  const OptimizerChoice choice(config.optimizer, *model);
  const Ranks ranks = layout.replicas ? Ranks(*layout.replicas) : Ranks(layout.world);
  return make_data_strategy(config, model, ranks, layout, std::move(buckets), choice);
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
      training_parts::run_backward(output.sum() * 0);  // the mean over no samples is NaN
      continue;
    }
    at::Tensor mean =
        with_auxiliary_loss(loss(task, output, batch.target.slice(0, begin, end)), model());
    if (share < 1) mean = mean * share;
    training_parts::run_backward(mean);
    mean_loss.add(mean);
  }
  mean_loss.begin_copy();
  finish_gradients();
  return mean_loss;
}

}  // namespace cadre::train
