#include "cadre/parallel/fsdp/shard_unit.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/fsdp/sharded_units.h"

namespace cadre {
namespace parallel {

struct UnitCall::State {
  std::shared_ptr<ShardedUnits> units;
  ShardedUnits::Call call;
  bool has_returned = false;
};

UnitCall::UnitCall(const ShardUnitBase& unit, std::span<const at::Tensor> inputs) {
  const ShardUnitBase::Binding& binding = unit.binding();
  if (!binding.is_sharded) {
    throw Error(ErrorCode::kInvalidArgument,
                "cadre::ShardUnit: forward() of a unit for which fully_shard() was called, but no "
                "FullyShardedDataParallel was made of the model, so its gradients would not be "
                "reduced. Make FullyShardedDataParallel model{module, group} and call the model");
  }
  auto units = binding.units.lock();
  if (!units) {
    throw Error(ErrorCode::kInvalidArgument,
                "cadre::ShardUnit: forward() of a unit whose FullyShardedDataParallel was "
                "destroyed, so its parameters cannot be gathered from the ranks. Keep the wrapper "
                "as long as the module is used");
  }
  const ShardPrecision& precision = units->precision(binding.index);
  auto call = units->before_forward(binding.index, inputs);
  if (precision.cast_inputs) input_dtype_ = precision.parameters;
  output_dtype_ = precision.outputs;
  state_ = std::make_unique<State>(State{.units = std::move(units), .call = std::move(call)});
}

UnitCall::~UnitCall() {
  if (state_ && !state_->has_returned) {
    state_->units->schedule().fail_forward(state_->call->unit);
  }
}

void UnitCall::returned(std::span<const at::Tensor> outputs) {
  state_->units->after_forward(state_->call, outputs);
  state_->has_returned = true;
}

at::Tensor cast_floating(const at::Tensor& tensor, std::optional<c10::ScalarType> dtype) {
  return dtype && tensor.is_floating_point() ? tensor.to(*dtype) : tensor;
}

torch::nn::Module& checked_unit(torch::nn::Module* module) {
  if (module != nullptr) return *module;
  throw Error(ErrorCode::kInvalidArgument,
              "cadre::fully_shard: the module is null; make it first, for example with "
              "std::make_shared<Block>()");
}

}  // namespace parallel

void fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  auto* unit = dynamic_cast<parallel::ShardUnitBase*>(&module);
  if (unit == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                format("cadre::fully_shard: {0} is not a ShardUnit. Choose it as a unit by "
                       "options.wrap_policy = cadre::wrap_by_type<{0}>(), or declare it as "
                       "cadre::ShardUnit<{0}>",
                       module.name()));
  }
  parallel::ShardUnitBase::Binding& binding = unit->binding();
  if (binding.is_sharded) {
    throw Error(ErrorCode::kInvalidArgument,
                format("cadre::fully_shard: {} is a unit of a FullyShardedDataParallel already; "
                       "call fully_shard() before the wrapper is made",
                       module.name()));
  }
  if (binding.is_wrapped) {
    throw Error(ErrorCode::kInvalidArgument,
                format("cadre::fully_shard: {} is in a model that a FullyShardedDataParallel has "
                       "sharded already, and its parameters belong to the unit around it; call "
                       "fully_shard() before the wrapper is made",
                       module.name()));
  }
  if (binding.is_declared) {
    throw Error(ErrorCode::kInvalidArgument,
                format("cadre::fully_shard: called twice for one {}; call it once for each unit",
                       module.name()));
  }
  if (module.parameters().empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                format("cadre::fully_shard: {} has no parameters to shard; leave out this call",
                       module.name()));
  }
  binding.is_declared = true;
  binding.options = options;
}

}  // namespace cadre
