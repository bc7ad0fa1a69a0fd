// One program for every strategy. A Training wraps a module and its optimizer as its options say,
// or as the environment variable CADRE_STRATEGY says, so the same program trains in one process,
// with DistributedDataParallel, with ZeRO or with FullyShardedDataParallel. If its layers are those
// of Cadre, ranks can also divide them (tensor parallelism) or the tokens (context parallelism),
// and the layers of a torch::nn::Sequential can be on different ranks (pipeline parallelism). The
// program calls it as it calls the module, then backward() and step(); an example is in
// <cadre/training.h>. The gradients are those of the mean over the samples of all ranks, so the
// results are those of one process with the whole batch.
//
// Threads: one. Blocking: the constructor, calls of the model, backward(), step(), mean(), save()
// and load() are collective, until the group's deadline. Lifetime: keeps the module and the groups.
// Errors: kInvalidArgument for options (training_options.h) and for modules that a wrapper refuses;
// those of the wrappers, the optimizers and the snapshots. Source: Accelerate's Accelerator and
// Lightning's Fabric; DeepSpeed's engine for step(inputs, targets, loss).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/hooks/autocast.h"
#include "cadre/tensor/hooks/map_tensors.h"
#include "cadre/tensor/mesh/ranks.h"
#include "cadre/tensor/optim/optimizer_of.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/snapshot_folder.h"
#include "cadre/train/checkpoint/snapshot_parts.h"
#include "cadre/train/data/data_loader.h"
#include "cadre/train/training/copy_agreement.h"
#include "cadre/train/training/divided_model.h"
#include "cadre/train/training/pipelined_model.h"
#include "cadre/train/training/training_division.h"
#include "cadre/train/training/training_options.h"

namespace cadre {

// A parameter of the module before it is divided.
struct WholeParameter {
  const std::string& name;
  at::IntArrayRef sizes;
};

// The parameters to which other options of the optimizer apply: those for which `contains` returns
// true and that are in no earlier group.
template <typename Options>
struct ParameterGroup {
  std::function<bool(const WholeParameter& parameter)> contains;
  Options options;
};

// What a step has computed.
struct StepResult {
  at::Tensor loss;  // shape (): this rank's mean loss, without a graph
  // The norm of all gradients before they were scaled; nullopt without TrainingOptions::max_norm.
  std::optional<double> norm;
};

namespace training_parts {

// Returns for each parameter, by name, the index of the first group that contains it; the number of
// groups if none does. Collective: an exception of one rank is thrown on all.
using GroupOfParameter = std::map<std::string, size_t>;
CADRE_EXPORT GroupOfParameter
group_of_parameters(const torch::nn::Module& module,
                    std::span<const std::function<bool(const WholeParameter& parameter)>> groups,
                    const ProcessGroup& world);

// Throws: the degree pipeline is above 1, and `call` needs the whole model on each rank.
[[noreturn]] CADRE_EXPORT void refuse_for_pipelines(std::string_view call);

// Returns the mean of a value over the rows of all ranks of the group. num_rows: this rank's, which
// have the mean `value`. Collective.
CADRE_EXPORT double mean_over_rows(const at::Tensor& value, int64_t num_rows,
                                   const ProcessGroup& group);

// Runs the backward. If it throws, releases the graph, which libtorch would otherwise keep.
CADRE_EXPORT void run_backward(const at::Tensor& loss);

// Returns the numbers of rows of the parts into which a batch is divided. Throws if the tensors
// have different numbers of rows.
CADRE_EXPORT std::vector<int64_t> rows_of_parts(const at::Tensor& inputs, const at::Tensor& targets,
                                                int64_t num_parts);

// Returns options.fsdp with the weighting, and with a policy if it has none.
CADRE_EXPORT FullyShardedDataParallelOptions with_units(const TrainingOptions& options);

// Save and load the model and the state of the optimizer. Collective.
CADRE_EXPORT void save(SnapshotFolder& folder, int64_t step, SnapshotParts parts,
                       const torch::optim::Optimizer& optimizer, const TrainingDivision& division);
CADRE_EXPORT LoadedSnapshot load(const std::string& path, const SnapshotParts& parts,
                                 torch::optim::Optimizer& optimizer,
                                 const TrainingDivision& division, const LoadOptions& options);

}  // namespace training_parts

// M: a torch::nn::Module with a forward() of any arguments. Options: those of an optimizer, such as
// torch::optim::AdamWOptions. O: the optimizer, which works element by element.
template <typename M, OptionsOfOptimizer Options, typename O = typename OptimizerOf<Options>::Type>
class Training {
 public:
  using Groups = std::vector<ParameterGroup<Options>>;

  // optimizer: the options of all parameters that are in no group. ranks: a group or a mesh of one
  // axis; for hsdp also a mesh of two axes (replicate, then shard). Broadcasts rank 0's values.
  // The module may be one of defer_init().
  Training(const std::shared_ptr<M>& module, const Options& optimizer, const Ranks& ranks,
           TrainingOptions options = {}, const Groups& groups = {})
      : options_(std::move(options)),
        division_(ranks, options_),
        optimizer_(optimizer),
        groups_(groups),
        group_of_parameter_(grouped(module)),
        module_(module),
        divided_(module, division_, options_),
        agreement_(division_, divided_.records()),
        model_(make_model(module)),
        updates_(make_optimizer()) {}
  // Takes a module holder, for example Net of TORCH_MODULE(Net) or torch::nn::Sequential.
  template <ModuleHolder Holder>
    requires std::is_same_v<typename Holder::ContainedType, M>
  Training(const Holder& module, const Options& optimizer, const Ranks& ranks,
           TrainingOptions options = {}, const Groups& groups = {})
      : Training(module.is_empty() ? nullptr : module.ptr(), optimizer, ranks, std::move(options),
                 groups) {}
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  // Calls the module, on this rank's rows of a batch. Throws with the degree pipeline.
  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }
  template <typename... Args>
  auto forward(Args&&... args) {
    if (divided_.compares_inputs()) check_arguments(args...);
    if (!divided_.divides_tokens()) return call(std::forward<Args>(args)...);
    divided_.begin_forward();
    // Copies of the arguments with tensors, which get other values.
    std::tuple<OwnTokens<Args>...> own(std::forward<Args>(args)...);
    const auto cut = [this](auto& argument) {
      wrap::replace_tensors(argument,
                            [this](const at::Tensor& whole) { return divided_.own_tokens(whole); });
    };
    std::apply([&cut](auto&... arguments) { (cut(arguments), ...); }, own);
    return std::apply(
        [this](auto&... arguments) { return this->call(static_cast<Args&&>(arguments)...); }, own);
  }

  // Computes the gradients of this rank's mean loss, and reduces them to those of the mean over the
  // samples of all ranks.
  void backward(const at::Tensor& loss) { training_parts::run_backward(loss); }
  // Computes the gradients in parts; see DataParallelModule::backward_in_parts().
  template <typename LossOf>
  at::Tensor backward_in_parts(std::span<const int64_t> num_samples, const LossOf& loss_of) {
    return with_wrapper([&](auto& model) { return model.backward_in_parts(num_samples, loss_of); });
  }
  // Updates the parameters and clears the gradients. Before that it scales the gradients, if
  // TrainingOptions::max_norm is set, and returns their norm before the scaling.
  std::optional<double> step() {
    std::optional<double> norm;
    agreement_.agree_on_step(optimizer());
    if (options_.max_norm) norm = clip_grad_norm(*options_.max_norm);
    if (const auto* const pipeline = pipelined()) pipeline->parameters().prepare_step();
    optimizer().step();
    if (const auto* const pipeline = pipelined()) pipeline->parameters().fill_copies();
    zero_grad();
    return norm;
  }
  // One step on this rank's rows of a batch: forward and backward of TrainingOptions::num_parts
  // parts, then step(). inputs, targets: tensors (rows, ...) with equal numbers of rows. A part may
  // have no rows, if the module accepts that. loss(output, target) returns the mean over the rows.
  // The only form of a step with the degree pipeline.
  template <typename Loss>
  StepResult step(const at::Tensor& inputs, const at::Tensor& targets, const Loss& loss) {
    const std::vector<int64_t> num_rows =
        training_parts::rows_of_parts(inputs, targets, options_.num_parts);
    num_rows_ = inputs.size(0);
    divided_.check_inputs(std::array{inputs, targets});
    if (auto* const pipeline = pipelined()) {
      const auto [own, loss_of_parts] = for_stages(inputs, loss);
      const at::Tensor mean_loss = pipeline->backward(own, targets, loss_of_parts);
      return {.loss = mean_loss, .norm = step()};
    }
    int64_t begin = 0;
    const at::Tensor mean = backward_in_parts(num_rows, [&](size_t part) -> at::Tensor {
      const int64_t first = std::exchange(begin, begin + num_rows[part]);
      if (options_.before_part) options_.before_part(first, num_rows[part]);
      const at::Tensor output = forward(inputs.narrow(0, first, num_rows[part]));
      return loss(output, targets.narrow(0, first, num_rows[part]));
    });
    return {.loss = mean.detach(), .norm = step()};
  }

  // Returns the mean loss over this rank's rows of a batch, shape (), without gradients, under
  // every strategy. It does not change the mode of the module: call eval() before it. Collective.
  template <typename Loss>
  at::Tensor evaluate(const at::Tensor& inputs, const at::Tensor& targets, const Loss& loss) {
    const at::NoGradGuard no_grad;
    training_parts::rows_of_parts(inputs, targets, 1);
    num_rows_ = inputs.size(0);
    divided_.check_inputs(std::array{inputs, targets});
    if (auto* const pipeline = pipelined()) {
      const auto [own, loss_of_parts] = for_stages(inputs, loss);
      return pipeline->evaluate(own, targets, loss_of_parts);
    }
    return loss(forward(inputs), targets);
  }

  // Clears the gradients.
  void zero_grad() {
    if (auto* const pipeline = pipelined()) return pipeline->parameters().zero_grad();
    with_wrapper([](auto& model) { model.zero_grad(); });
  }
  // Scales the gradients such that their norm over all ranks is at most max_norm. Returns the norm
  // before the scaling.
  double clip_grad_norm(double max_norm) {
    if (const std::vector<ParameterShard> shards = divided_gradients(); !shards.empty()) {
      return cadre::clip_grad_norm_(std::span<const ParameterShard>(shards), max_norm);
    }
    return with_wrapper([&](auto& model) { return cadre::clip_grad_norm_(model, max_norm); });
  }
  // Sets the number of samples of this rank's next forward with grad, if that is not size(0) of its
  // first tensor: for sequence-first inputs, for example. See DataParallelModule.
  void set_num_samples(int64_t count) {
    with_wrapper([&](auto& model) { model.set_num_samples(count); });
  }
  // Returns the mean over the samples of all ranks of a value that is the mean over this rank's
  // samples of the last forward, or of all parts of the last step.
  double mean(const at::Tensor& value) {
    if (pipelined()) return training_parts::mean_over_rows(value, num_rows_, division_.rows());
    return with_wrapper([&](auto& model) { return model.mean_over_ranks(value); });
  }

  void train(bool on = true) { module()->train(on); }
  void eval() { module()->eval(); }
  M* operator->() const { return module().get(); }
  // Returns the module. With the degree pipeline the parameters of other ranks' layers are empty.
  const std::shared_ptr<M>& module() const { return module_; }
  DataStrategy strategy() const { return division_.strategy(); }
  // Returns the strategy, the degrees, and the ranks along each axis.
  const TrainingDivision& division() const { return division_; }

  // Returns the optimizer, for example for a scheduler. Its parameters are this rank's shards under
  // fsdp and hsdp.
  torch::optim::Optimizer& optimizer() {
    return std::visit([](auto& updates) -> torch::optim::Optimizer& { return *updates; }, updates_);
  }

  // Makes a loader whose batches the ranks divide, of what make_data_loader() takes, or of a shared
  // dataset. options.ranks is ignored.
  template <typename D>
  DataLoader loader(D dataset, DataLoaderOptions options) const {
    options.ranks = division_.rows();
    if constexpr (std::convertible_to<D, std::shared_ptr<const Dataset>>) {
      return DataLoader(std::move(dataset), options);
    } else {
      return make_data_loader(std::move(dataset), options);
    }
  }

  // Returns call(wrapper) with the DistributedDataParallel or FullyShardedDataParallel of the
  // module, for what only wrappers have, such as no_sync() and set_num_samples(). Throws with the
  // degree pipeline, which has none.
  template <typename Call>
  auto with_wrapper(const Call& call) {
    if (auto* const replicated = std::get_if<Replicated>(&model_)) return call(*replicated);
    if (auto* const sharded = std::get_if<Sharded>(&model_)) return call(*sharded);
    training_parts::refuse_for_pipelines("a call of the model or of its wrapper");
  }
  template <typename Call>
  auto with_wrapper(const Call& call) const {
    if (const auto* const replicated = std::get_if<Replicated>(&model_)) return call(*replicated);
    if (const auto* const sharded = std::get_if<Sharded>(&model_)) return call(*sharded);
    training_parts::refuse_for_pipelines("a call of the model or of its wrapper");
  }
  // Returns the shards that this rank updates; an empty list if it updates whole parameters, as
  // under ddp without the degree tensor.
  std::vector<ParameterShard> parameter_shards() const {
    if (const auto* const sharded = std::get_if<Sharded>(&model_)) {
      return sharded->parameter_shards();
    }
    if (const auto* const zero = std::get_if<std::unique_ptr<Zero>>(&updates_)) {
      return (*zero)->parameter_shards();
    }
    if (const auto* const pipeline = pipelined()) return pipeline->records();
    return divided_.records();
  }
  // Returns the optimizer of the tensors of parts(), which differs from optimizer() under zero1 and
  // zero2.
  torch::optim::Optimizer& local_optimizer() {
    if (const auto* const zero = std::get_if<std::unique_ptr<Zero>>(&updates_)) {
      return (*zero)->local_optimizer();
    }
    return optimizer();
  }

  // Returns this rank's tensors of the model, without the state of the optimizer. Collective with
  // the degree pipeline, else local.
  SnapshotParts parts() const {
    if (const auto* const pipeline = pipelined()) return pipeline->parts();
    const std::vector<ParameterShard> shards = parameter_shards();
    return shards.empty() ? parts_of(*module()) : parts_of(shards, *module());
  }
  // Saves model and optimizer, and `extra`, a JSON object of the program. All ranks pass the same
  // step.
  void save(SnapshotFolder& folder, int64_t step, std::string extra = "{}") {
    SnapshotParts saved = parts();
    saved.extra = std::move(extra);
    training_parts::save(folder, step, std::move(saved), local_optimizer(), division_);
  }
  // Loads model and optimizer of a snapshot, which may come from another strategy and from another
  // number of ranks. After an error of the optimizer's state the model has the loaded values.
  LoadedSnapshot load(const std::string& path, const LoadOptions& options = {}) {
    LoadedSnapshot loaded =
        training_parts::load(path, parts(), local_optimizer(), division_, options);
    if (const auto* const pipeline = pipelined()) pipeline->parameters().fill_copies();
    return loaded;
  }

 private:
  using Replicated = DistributedDataParallel<M>;
  using Sharded = FullyShardedDataParallel<M>;
  using Zero = ZeroRedundancyOptimizer<O>;

  // What forward() keeps of an argument while it has only this rank's tokens.
  template <typename Arg>
  using OwnTokens =
      std::conditional_t<wrap::kHoldsReplaceableTensors<Arg>, std::remove_cvref_t<Arg>, Arg&&>;

  // Compares the tensors among the arguments with those of the other ranks of the copy.
  template <typename... Args>
  void check_arguments(const Args&... args) {
    std::vector<at::Tensor> tensors;
    const auto add = [&tensors](auto arg) {
      wrap::replace_tensors(arg,
                            [&](const at::Tensor& tensor) { return tensors.emplace_back(tensor); });
    };
    const auto add_copy = [&add](const auto& arg) {
      if constexpr (wrap::kHoldsReplaceableTensors<decltype(arg)>) add(arg);
    };
    (add_copy(args), ...);
    divided_.check_inputs(tensors);
  }

  // Calls the wrapper, under autocast if it is set.
  template <typename... Args>
  auto call(Args&&... args) {
    return with_wrapper([&](auto& model) {
      using Output = decltype(model(std::forward<Args>(args)...));
      if constexpr (std::is_void_v<Output>) {
        model(std::forward<Args>(args)...);
      } else {
        std::optional<Autocast> autocast;
        if (options_.autocast) autocast.emplace(*options_.autocast);
        Output output = model(std::forward<Args>(args)...);
        autocast.reset();
        wrap::replace_tensors(output, [this](const at::Tensor& tensor) { return whole(tensor); });
        if constexpr (wrap::kHoldsReplaceableTensors<Output>) {
          if (!division_.tensor()) return output;
          std::vector<at::Tensor> outputs;
          wrap::replace_tensors(output, [&outputs](const at::Tensor& tensor) {
            return outputs.emplace_back(tensor);
          });
          divided_.check_outputs(outputs);
        }
        return output;
      }
    });
  }

  // Returns a result of the module in the dtype of losses, with the tokens of all ranks.
  at::Tensor whole(const at::Tensor& result) const {
    at::Tensor converted = result;
    if (options_.autocast && result.scalar_type() == *options_.autocast) {
      converted = result.to(at::kFloat);
    }
    return divided_.divides_tokens() ? divided_.whole_tokens(converted) : converted;
  }

  using Pipelined = training_parts::PipelinedModel;
  Pipelined* pipelined() { return std::get_if<Pipelined>(&model_); }
  const Pipelined* pipelined() const { return std::get_if<Pipelined>(&model_); }

  // Returns what the first stage gets of the inputs, and the loss of the results of the last one.
  template <typename Loss>
  std::pair<at::Tensor, PipelineLoss> for_stages(const at::Tensor& inputs, const Loss& loss) {
    agreement_.agree_on_microbatches(inputs.size(0), options_.num_parts);
    divided_.begin_forward();
    const at::Tensor own = divided_.divides_tokens() ? divided_.own_tokens(inputs) : inputs;
    return {own, [this, &loss](const at::Tensor& output, const at::Tensor& target) -> at::Tensor {
              const at::Tensor result = whole(output);
              divided_.check_outputs({&result, 1});
              return loss(result, target);
            }};
  }

  // Returns the shards that have the gradients, if layers are divided.
  std::vector<ParameterShard> divided_gradients() const {
    if (pipelined()) return parameter_shards();
    if (!division_.tensor()) return {};
    return strategy() == DataStrategy::kZero1 ? divided_.records() : parameter_shards();
  }

  training_parts::GroupOfParameter grouped(const std::shared_ptr<M>& module) const {
    if (module == nullptr || groups_.empty()) return {};
    std::vector<std::function<bool(const WholeParameter&)>> contains;
    for (const ParameterGroup<Options>& group : groups_) contains.push_back(group.contains);
    return training_parts::group_of_parameters(*module, contains, division_.world());
  }

  using Model = std::variant<Replicated, Sharded, Pipelined>;
  Model make_model(const std::shared_ptr<M>& module) {
    if (division_.stages()) return Pipelined(module, division_, options_);
    if (has_units(strategy())) {
      return Sharded(module, division_.wrapped_ranks(), training_parts::with_units(options_));
    }
    DistributedDataParallelOptions ddp = options_.ddp;
    ddp.weighting = options_.weighting;
    ddp.gradients = strategy() == DataStrategy::kZero2 ? GradientPlacement::kSharded
                                                       : GradientPlacement::kReplicated;
    return Replicated(module, division_.wrapped_ranks(), ddp);
  }

  using Updates =
      std::variant<std::unique_ptr<O>, std::unique_ptr<Zero>, std::unique_ptr<ShardedOptimizer<O>>>;
  Updates make_optimizer() {
    if (auto* const sharded = std::get_if<Sharded>(&model_)) {
      return std::make_unique<ShardedOptimizer<O>>(
          *sharded, optimizer_groups(values_of(sharded->parameter_shards())), defaults());
    }
    if (const auto* const pipeline = pipelined()) {
      return std::make_unique<O>(optimizer_groups(values_of(pipeline->records())), defaults());
    }
    auto& replicated = std::get<Replicated>(model_);
    const auto groups = optimizer_groups(distinct_parameters(*replicated.module()));
    if (strategy() == DataStrategy::kZero1 || strategy() == DataStrategy::kZero2) {
      ZeroOptions zero = options_.zero;
      if (!zero.wait_in_step) zero.wait_in_step = true;
      return std::make_unique<Zero>(replicated, groups, defaults(), zero);
    }
    return std::make_unique<O>(groups, defaults());
  }

  static std::vector<NamedTensor> values_of(const std::vector<ParameterShard>& shards) {
    std::vector<NamedTensor> values;
    for (const ParameterShard& shard : shards) values.push_back({shard.name, shard.values});
    return values;
  }

  // torch::optim replaces an option of a group that equals the default of its class by the option
  // of the optimizer. So every option is set in the groups, and the optimizer has the defaults of
  // the class.
  static Options defaults() {
    if constexpr (std::is_default_constructible_v<Options>) {
      return Options();
    } else {
      return Options(1e-3);  // SGDOptions, whose learning rate has this default and must be given
    }
  }

  std::vector<torch::optim::OptimizerParamGroup> optimizer_groups(
      const std::vector<NamedTensor>& parameters) {
    agreement_.set_names(parameters);
    std::vector<std::vector<at::Tensor>> members(groups_.size() + 1);
    for (const NamedTensor& parameter : parameters) {
      const size_t group = groups_.empty() ? 0 : group_of_parameter_.at(parameter.name);
      members[group].push_back(parameter.tensor);
    }
    std::vector<torch::optim::OptimizerParamGroup> made;
    for (size_t i = 0; i < members.size(); ++i) {
      made.emplace_back(
          std::move(members[i]),
          std::make_unique<Options>(i < groups_.size() ? groups_[i].options : optimizer_));
    }
    return made;
  }

  TrainingOptions options_;
  TrainingDivision division_;
  Options optimizer_;
  Groups groups_;
  training_parts::GroupOfParameter group_of_parameter_;
  std::shared_ptr<M> module_;
  training_parts::DividedModel divided_;
  training_parts::CopyAgreement agreement_;
  Model model_;
  Updates updates_;
  int64_t num_rows_ = -1;  // the rows of the last step or evaluation; -1 before the first
};

template <ModuleHolder Holder, typename Options>
Training(const Holder&, const Options&, const Ranks&, TrainingOptions = {},
         const std::vector<ParameterGroup<Options>>& = {})
    -> Training<typename Holder::ContainedType, Options>;
template <typename M, typename Options>
Training(const std::shared_ptr<M>&, const Options&, const Ranks&, TrainingOptions = {},
         const std::vector<ParameterGroup<Options>>& = {}) -> Training<M, Options>;

}  // namespace cadre
