#include "cadre/parallel/plan/model_sizes.h"

#include <torch/nn/module.h>

#include <unordered_map>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/fsdp/unit_assignment.h"
#include "cadre/tensor/group/operands/dtype.h"
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
  const parallel::UnitAssignment assignment = parallel::assign_units(module, options);
  ModelSizes sizes{.parameters = {}, .units = {}};
  std::unordered_map<const void*, size_t> unit_of;
  for (const parallel::AssignedUnit& unit : assignment.units) {
    for (const NamedTensor& parameter : unit.parameters) {
      unit_of[parameter.tensor.unsafeGetTensorImpl()] = sizes.units.size();
    }
    sizes.units.push_back({.name = unit.name, .parent = unit.parent});
  }
  for (const NamedTensor& parameter : distinct_parameters(*module)) {
    const auto dtype = to_dtype(parameter.tensor.scalar_type());
    if (!dtype) {
      throw Error(ErrorCode::kInvalidArgument,
                  format("model_sizes_of: \"{}\" has dtype {}, which groups do not support",
                         parameter.name, c10::toString(parameter.tensor.scalar_type())));
    }
    sizes.parameters.push_back({.name = parameter.name,
                                .sizes = parameter.tensor.sizes().vec(),
                                .dtype = *dtype,
                                .is_trained = parameter.tensor.requires_grad(),
                                .unit = unit_of.at(parameter.tensor.unsafeGetTensorImpl())});
  }
  for (const at::Tensor& buffer : module->buffers()) {
    sizes.buffer_bytes += static_cast<int64_t>(buffer.nbytes());
  }
  return sizes;
}

}  // namespace cadre
