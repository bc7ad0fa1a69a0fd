#include "cadre/parallel/pp/pipeline_stage.h"

#include <algorithm>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {

PipelineStage::PipelineStage(TensorFunction function, std::vector<NamedTensor> parameters,
                             const PipelineStageOptions& options)
    : PipelineStage(std::move(function), std::move(parameters), {}, options) {}

PipelineStage::PipelineStage(TensorFunction function, std::vector<NamedTensor> parameters,
                             std::vector<at::Tensor> buffers, const PipelineStageOptions& options)
    : function_(std::move(function)),
      parameters_(std::move(parameters)),
      buffers_(std::move(buffers)),
      options_(options) {
  if (options_.num_stages < 1 || options_.stage < 0 || options_.stage >= options_.num_stages) {
    throw Error(ErrorCode::kInvalidArgument,
                format("cadre::PipelineStage: there is no stage {} of {}; stages are counted from "
                       "0 to num_stages - 1",
                       options_.stage, options_.num_stages));
  }
  if (!function_) {
    throw Error(ErrorCode::kInvalidArgument,
                format("cadre::PipelineStage: the module or function of stage {} of {} is empty",
                       options_.stage, options_.num_stages));
  }
}

std::vector<NamedTensor> PipelineStage::named_parameters(const torch::nn::Module* module) {
  return module == nullptr ? std::vector<NamedTensor>{} : distinct_parameters(*module);
}

void PipelineStage::check_num_inputs(size_t given, size_t expected) {
  if (given == expected) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("forward() takes {} tensors and is given {}: the outputs of a stage are the "
                     "inputs of the next one",
                     expected, given));
}

std::vector<at::Tensor> PipelineStage::forward(const std::vector<at::Tensor>& inputs) const {
  if (!has_function()) {
    throw Error(ErrorCode::kInvalidArgument,
                format("cadre::PipelineStage: stage {} of {} was moved from", options_.stage,
                       options_.num_stages));
  }
  if (!options_.recompute || !checkpointing_is_useful()) return function_(inputs);
  return checkpoint(function_, inputs, buffers_);
}

}  // namespace cadre
