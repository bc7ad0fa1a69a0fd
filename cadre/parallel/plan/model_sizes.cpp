#include "cadre/parallel/plan/model_sizes.h"

#include <torch/nn/module.h>

#include <unordered_map>

#include "cadre/core/base/error.h"
#include "cadre/parallel/fsdp/unit_assignment.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

ModelSizes model_sizes_of(const std::shared_ptr<torch::nn::Module>& module,
                          const WrapPolicy& policy) {
  if (module == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "model_sizes_of: the module is null; construct it first");
  }
  FullyShardedDataParallelOptions options;
  options.wrap_policy = policy;
  ModelSizes sizes{.parameters = {}, .units = {}};
  std::unordered_map<std::string, size_t> unit_of;
  for (const parallel::AssignedUnit& unit : parallel::assign_units(module, options).units) {
    for (const NamedTensor& parameter : unit.parameters) {
      unit_of[parameter.name] = sizes.units.size();
    }
    sizes.units.push_back({.name = unit.name, .parent = unit.parent});
  }
  try {
    sizes.parameters = sizes_of(distinct_parameters(*module));
  } catch (const Error& error) {
    throw error.with_context("model_sizes_of");
  }
  for (ParameterSize& parameter : sizes.parameters) parameter.unit = unit_of.at(parameter.name);
  for (const at::Tensor& buffer : module->buffers()) {
    sizes.buffer_bytes += static_cast<int64_t>(buffer.nbytes());
  }
  return sizes;
}

}  // namespace cadre
