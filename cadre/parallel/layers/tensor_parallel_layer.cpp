#include "cadre/parallel/layers/tensor_parallel_layer.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/hooks/device_check.h"
#include "cadre/tensor/hooks/replica_check.h"
#include "cadre/tensor/hooks/shard_mark.h"
#include "cadre/tensor/hooks/tensor_version.h"
#include "cadre/tensor/mesh/layout.h"

namespace cadre {

std::string_view to_string(ParallelStyle style) {
  switch (style) {
    case ParallelStyle::kColwise:
      return "kColwise";
    case ParallelStyle::kRowwise:
      return "kRowwise";
    case ParallelStyle::kSequence:
      return "kSequence";
    case ParallelStyle::kReplicated:
      return "kReplicated";
  }
  return "?";
}

void TensorParallelLayer::check(const LayerParallelism& how, std::string_view name,
                                DividedParameters& divided) const {
  const std::string what = format("dividing \"{}\"", name);
  wrap::refuse_inference_mode(what);
  wrap::refuse_inference_tensors(what, parameters_of_layer());
  wrap::check_devices(what, parameters_of_layer(), how.group.device());
  const auto refuse = [&](const std::string& problem) {
    throw Error(ErrorCode::kInvalidArgument,
                format("\"{}\" cannot be {} on the {} ranks of group \"{}\": {}", name,
                       to_string(how.style), how.group.world_size(), how.group.name(), problem));
  };
  if (is_parallelized()) {
    refuse(format("it is {} on the {} ranks of group \"{}\" already; parallelize a module once",
                  to_string(parallelism_->style), parallelism_->group.world_size(),
                  parallelism_->group.name()));
  }
  if (const std::optional<std::string> problem = problem_of(how)) refuse(*problem);
  for (const NamedTensor& parameter : parameters_of_layer()) {
    const at::Tensor& tensor = parameter.tensor;
    if (tensor.grad().defined()) {
      refuse(
          format("its {} has a gradient; parallelize a module before its first backward, or "
                 "zero_grad() before",
                 parameter.name));
    }
    const std::optional<int64_t> dim = divided_dim(parameter.name, how.style);
    const DividedParameter divided_parameter{.sizes = tensor.sizes().vec(), .dim = dim};
    const auto [known, is_first] =
        divided.try_emplace(tensor.unsafeGetTensorImpl(), divided_parameter);
    if (!is_first && known->second.dim != dim) {
      refuse(
          format("its {} is also a parameter of another layer, whose style divides it in another "
                 "way; give both layers styles that divide the same dimension, such as kRowwise "
                 "for an embedding and kColwise for a linear layer",
                 parameter.name));
    }
  }
}

void TensorParallelLayer::parallelize(const LayerParallelism& how, std::string_view name,
                                      const DividedParameters& divided) {
  const int num_ranks = how.group.world_size();
  const int rank = how.group.rank();
  const at::NoGradGuard no_grad;
  for (const NamedTensor& parameter : parameters_of_layer()) {
    at::Tensor tensor = parameter.tensor;
    const auto& [sizes, dim] = divided.at(tensor.unsafeGetTensorImpl());
    // If the sizes differ from the whole ones, another layer that shares the parameter has already
    // divided it.
    if (num_ranks == 1 || !dim || tensor.sizes() != at::IntArrayRef(sizes)) continue;
    const Chunk chunk = chunk_of(tensor.size(*dim), num_ranks, rank);
    tensor.set_data(tensor.detach().narrow(*dim, chunk.begin, chunk.size).clone());
    wrap::mark_as_shard(tensor, {.parameter = format("{}.{}", name, parameter.name),
                                 .owner = format("divided by {}", to_string(how.style)),
                                 .rank = rank,
                                 .num_ranks = num_ranks});
  }
  parallelism_ = how;
  name_ = name;
  computes_alone_ = num_ranks == 1;
}

AgreedField TensorParallelLayer::agreed_field(const LayerParallelism& how,
                                              std::string_view name) const {
  std::string text =
      format("{}{}{}{}", to_string(how.style), how.sequence_parallel ? ", sequence_parallel" : "",
             how.gather_output ? ", gather_output" : "",
             how.input_is_parallel ? "" : ", input_is_parallel = false");
  const std::string options = options_text();
  if (!options.empty()) text += format(", with {}", options);
  return {format("\"{}\"", name), std::move(text)};
}

void TensorParallelLayer::check_features(const at::Tensor& input, int64_t expected) const {
  if (input.dim() > 0 && input.size(-1) == expected) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("\"{}\", which is {} on rank {} of {} of group \"{}\", takes {} features, but "
                     "its input has the sizes {}. After a column-parallel layer, whose output is "
                     "divided, use a row-parallel layer with input_is_parallel, or set "
                     "gather_output for the column-parallel layer",
                     name_, to_string(parallelism_->style), parallelism_->group.rank(),
                     parallelism_->group.world_size(), parallelism_->group.name(), expected,
                     list_of(input.sizes())));
}

void TensorParallelLayer::refuse_copy_if_parallelized() const {
  if (computes_alone_) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("clone: \"{}\" is {} on the {} ranks of group \"{}\", and a copy would have "
                     "only this rank's part; clone the module before it is parallelized",
                     name_, to_string(parallelism_->style), parallelism_->group.world_size(),
                     parallelism_->group.name()));
}

void make_equal(const torch::nn::Module& module, const ProcessGroup& group, const char* caller) {
  if (group.world_size() == 1) return;
  const std::vector<NamedTensor> parameters = distinct_parameters(module);
  const std::vector<NamedTensor> buffers = distinct_buffers(module);
  wrap::check_replicas_match(caller, {.parameters = parameters, .buffers = buffers}, group);
  wrap::broadcast_tensors(parameters, 0, group);
  wrap::broadcast_tensors(buffers, 0, group);
}

namespace layers {

void parallelize_new(TensorParallelLayer& layer, const LayerParallelism& how, const char* type) {
  DividedParameters divided;
  check_equal_on_all_ranks(
      how.group, type,
      [&] {
        layer.check(how, type, divided);
        return std::vector<AgreedField>{layer.agreed_field(how, type)};
      },
      "pass the same options on all ranks");
  make_equal(dynamic_cast<const torch::nn::Module&>(layer), how.group, type);
  layer.parallelize(how, type, divided);
}

}  // namespace layers

}  // namespace cadre
