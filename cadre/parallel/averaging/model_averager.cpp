#include "cadre/parallel/averaging/model_averager.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <optional>
#include <span>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/averaging/averaging_rule.h"
#include "cadre/parallel/shard/shardable.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/hooks/parameter_watch.h"
#include "cadre/tensor/hooks/replica_check.h"
#include "cadre/tensor/hooks/shard_mark.h"
#include "cadre/tensor/hooks/tensor_version.h"

namespace cadre {
namespace {

constexpr const char* kCall = "ModelAverager";
constexpr const char* kLoad = "ModelAverager::load_state()";
constexpr const char* kSteps = "num_steps";

void check_parameter(const NamedTensor& parameter) {
  if (const auto reason = shard::reason_without_values(parameter.tensor)) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: the parameter \"{}\" has no values on this rank; {}. Averaging needs "
                       "whole models: use a plain module or DistributedDataParallel",
                       kCall, parameter.name, *reason));
  }
  wrap::refuse_shard_as_whole(
      parameter.name, parameter.tensor, kCall,
      "Averaging needs whole models: use a plain module or DistributedDataParallel");
  if (!parameter.tensor.requires_grad() || parameter.tensor.is_floating_point()) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: the parameter \"{}\" is {}; only floating-point numbers are averaged. "
                     "Freeze it, or keep its parts in two parameters",
                     kCall, parameter.name, c10::toString(parameter.tensor.scalar_type())));
}

// Checks this rank's arguments and returns what must be equal on all ranks.
std::vector<AgreedField> agreed_fields(const std::shared_ptr<torch::nn::Module>& module,
                                       int num_ranks, const ModelAveragerOptions& options) {
  wrap::refuse_inference_mode(kCall);
  if (module == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: the module is null; construct it first", kCall));
  }
  const std::string method = averaging::text_of(options.method, num_ranks);
  const std::vector<NamedTensor> parameters = distinct_parameters(*module);
  for (const NamedTensor& parameter : parameters) check_parameter(parameter);
  const bool is_trained = std::ranges::any_of(
      parameters, [](const NamedTensor& parameter) { return parameter.tensor.requires_grad(); });
  if (!is_trained) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: no parameter of the module requires grad, so there is nothing to "
                       "average. Unfreeze the parameters before",
                       kCall));
  }
  return {{"method", method}, {"average_buffers", options.average_buffers ? "true" : "false"}};
}

averaging::Averaged averaged_of(const torch::nn::Module& module, bool with_buffers) {
  averaging::Averaged averaged;
  for (const NamedTensor& parameter : distinct_parameters(module)) {
    if (parameter.tensor.requires_grad()) averaged.parameters.push_back(parameter);
  }
  if (!with_buffers) return averaged;
  for (const NamedTensor& buffer : distinct_buffers(module)) {
    if (buffer.tensor.is_floating_point()) averaged.buffers.push_back(buffer);
  }
  return averaged;
}

}  // namespace

struct ModelAverager::Impl {
  Impl(const std::shared_ptr<torch::nn::Module>& module, const ProcessGroup& given,
       const ModelAveragerOptions& options)
      : group(given) {
    check_equal_on_all_ranks(
        group, kCall, [&] { return agreed_fields(module, group.world_size(), options); },
        "pass the same options on all ranks");
    const std::vector<NamedTensor> parameters = distinct_parameters(*module);
    const std::vector<NamedTensor> buffers = distinct_buffers(*module);
    if (group.world_size() > 1) {
      const wrap::LocatedGroup located(group);
      wrap::check_replicas_match(kCall, {.parameters = parameters, .buffers = buffers}, located);
      wrap::broadcast_tensors(parameters, Rank(0), located);
      wrap::broadcast_tensors(buffers, Rank(0), located);
    }
    watch.emplace(module);
    rule =
        averaging::make_rule(options.method, averaged_of(*module, options.average_buffers), group);
  }

  // Throws on all ranks, before anything is exchanged, if a rank is in another step, or its
  // parameters are no longer those that it averages.
  void agree(int64_t step) const {
    const auto steps = gather_words(group, kCall, 1, [&] {
      if (const auto change = watch->change()) {
        throw Error(ErrorCode::kInvalidArgument,
                    format("{}: {} since it was made, so the averaged parameters are not those of "
                           "the module. Make another one after the change, on all ranks",
                           kCall, *change));
      }
      return std::vector<int64_t>{step};
    });
    for (size_t rank = 1; rank < steps.size(); ++rank) {
      if (steps[rank] == steps[0]) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  format("{}: rank {} is in step {} and rank 0 in step {}. Call step() equally "
                         "often on all ranks, and load the same state on all of them",
                         kCall, rank, steps[rank][0], steps[0][0]));
    }
  }

  // Exchanges models. An exception that is no error of Cadre, such as that of an allocation, a
  // communication hook or an outer optimizer, may be one of this rank alone. The other ranks would
  // wait for its messages, so the group is aborted.
  void exchange(const std::function<void()>& call) const {
    try {
      call();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      abort(error.what());
      throw;
    } catch (...) {
      abort("an exception that is no std::exception");
      throw;
    }
  }
  void abort(const char* what) const {
    group.abort(format("{} has thrown on rank {}: {}", kCall, group.rank(), what));
  }

  const ProcessGroup group;
  // Both are set by the constructor, after the ranks have agreed.
  std::optional<wrap::ParameterWatch> watch;
  std::unique_ptr<averaging::Rule> rule;
  int64_t num_steps = 0;
  bool is_synchronized = true;
};

ModelAverager::ModelAverager(const std::shared_ptr<torch::nn::Module>& module, const Ranks& ranks,
                             const ModelAveragerOptions& options)
    : impl_(std::make_unique<Impl>(module, ranks.group(), options)) {}

ModelAverager::~ModelAverager() = default;

bool ModelAverager::step() {
  const int64_t step = impl_->num_steps + 1;
  if (!impl_->rule->is_due(step)) {
    impl_->num_steps = step;
    impl_->is_synchronized = false;
    return false;
  }
  impl_->agree(step);
  impl_->exchange([&] { impl_->rule->average(step); });
  impl_->num_steps = step;
  impl_->is_synchronized = impl_->rule->makes_all_equal(step);
  return true;
}

void ModelAverager::synchronize() {
  impl_->agree(impl_->num_steps);
  impl_->exchange([&] { impl_->rule->synchronize(); });
  impl_->is_synchronized = true;
}

int64_t ModelAverager::num_steps() const {
  return impl_->num_steps;
}

bool ModelAverager::is_synchronized() const {
  return impl_->is_synchronized;
}

AveragerState ModelAverager::state() const {
  const at::NoGradGuard no_grad;
  AveragerState state = {{kSteps, at::scalar_tensor(impl_->num_steps, at::kLong)}};
  impl_->rule->save(state);
  return state;
}

void ModelAverager::load_state(const AveragerState& state) {
  std::function<void()> apply;
  int64_t num_steps = 0;
  const auto make_fields = [&] {
    averaging::SavedTensors saved(kLoad, state);
    num_steps = saved.take_count(kSteps);
    apply = impl_->rule->load(saved);
    saved.check_all_taken();
    return std::vector<AgreedField>{{kSteps, format("{}", num_steps)}};
  };
  check_equal_on_all_ranks(impl_->group, kLoad, make_fields,
                           "load the states of one step on all ranks");
  apply();
  impl_->num_steps = num_steps;
  impl_->is_synchronized = false;
}

}  // namespace cadre
