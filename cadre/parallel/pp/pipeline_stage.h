// One stage of a model that is divided for pipeline parallelism: a function of tensors, with its
// parameters.
//
//   cadre::PipelineStage first(std::make_shared<Encoder>(), {.stage = 0, .num_stages = 2});
//
// A module's forward() takes one tensor, several tensors, or a std::vector of tensors. It returns a
// tensor, or a tuple, pair, array, vector or optional of tensors. A torch::nn::Sequential that
// takes one tensor is possible, too. The next stage gets the returned tensors in this order.
// Integer tensors may be among them; they have no gradient.
//
// Threads: as the module. Blocking: as its forward(). Lifetime: a value that is cheap to copy; it
// keeps the module.
// Errors: kInvalidArgument for an empty module and for a stage number that does not exist, and from
// forward() for a wrong number of inputs.
// Source: torch.distributed.pipelining.PipelineStage.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/hooks/activations/activation_checkpoint.h"
#include "cadre/tensor/hooks/forward_signature.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/hooks/output_tensors.h"

namespace torch::nn {
class Module;
}

namespace cadre {

struct PipelineStageOptions {
  int stage = 0;       // the index of the stage in the whole model, from 0
  int num_stages = 1;  // the number of stages in the whole model
  // If true, only the inputs of a forward are saved, and the backward computes the forward again
  // (activation checkpointing). If the schedule splits the backward into I (input gradients) and W
  // (weight gradients), the weight gradients are then computed in I, too.
  bool recompute = false;
};

// Identifies a parameter by its stage and its name in the stage's module.
struct StageParameter {
  int stage;
  std::string name;

  friend bool operator==(const StageParameter&, const StageParameter&) = default;
};

// Identifies a microbatch on whose rows a stage is about to compute: [first_row, first_row +
// num_rows) of the batch given to step() or forward().
struct PipelineMicrobatch {
  int stage;
  int index;
  int64_t first_row;
  int64_t num_rows;
};

class CADRE_EXPORT PipelineStage {
 public:
  // Makes a stage from a std::shared_ptr to a module, or from a module holder.
  template <typename Holder>
    requires requires(const Holder& holder) { holder->parameters(); }
  PipelineStage(const Holder& module, const PipelineStageOptions& options)
      : PipelineStage(function_of(module), named_parameters_of(module), buffers_of(module),
                      options) {
    module_ = module_of(module);
  }
  // Makes a stage from any function. `parameters` have the names that tie_parameters() takes.
  PipelineStage(TensorFunction function, std::vector<NamedTensor> parameters,
                const PipelineStageOptions& options);

  int stage() const { return options_.stage; }
  int num_stages() const { return options_.num_stages; }
  const PipelineStageOptions& options() const { return options_; }
  const std::vector<NamedTensor>& parameters() const { return parameters_; }
  const std::vector<at::Tensor>& buffers() const { return buffers_; }
  // Returns null if the stage was made from a function.
  const std::shared_ptr<const torch::nn::Module>& module() const { return module_; }

  // Returns false if the stage was moved from.
  bool has_function() const { return function_ != nullptr; }
  // Returns the outputs for these inputs, some of which may require grad.
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) const;

 private:
  PipelineStage(TensorFunction function, std::vector<NamedTensor> parameters,
                std::vector<at::Tensor> buffers, const PipelineStageOptions& options);
  static std::vector<NamedTensor> named_parameters(const torch::nn::Module* module);
  static void check_num_inputs(size_t given, size_t expected);

  template <typename Holder>
  static std::vector<NamedTensor> named_parameters_of(const Holder& holder) {
    return named_parameters(holder ? &*holder : nullptr);
  }
  template <typename Holder>
  static std::shared_ptr<const torch::nn::Module> module_of(const Holder& holder) {
    if constexpr (std::is_convertible_v<const Holder&, std::shared_ptr<const torch::nn::Module>>) {
      return holder;
    } else if constexpr (requires { holder.ptr(); }) {
      return holder ? holder.ptr() : nullptr;
    } else {
      return nullptr;
    }
  }
  template <typename Holder>
  static std::vector<at::Tensor> buffers_of(const Holder& holder) {
    return holder ? holder->buffers() : std::vector<at::Tensor>{};
  }

  template <typename Module, typename Output, typename Class, typename... Args>
  static std::vector<at::Tensor> call(Module& module, const std::vector<at::Tensor>& inputs,
                                      Output (Class::*)(Args...)) {
    return call_with<Args...>(module, inputs, std::index_sequence_for<Args...>());
  }
  template <typename Module, typename Output, typename Class, typename... Args>
  static std::vector<at::Tensor> call(Module& module, const std::vector<at::Tensor>& inputs,
                                      Output (Class::*)(Args...) const) {
    return call_with<Args...>(module, inputs, std::index_sequence_for<Args...>());
  }
  template <typename... Args, typename Module, size_t... kIndex>
  static std::vector<at::Tensor> call_with(Module& module, const std::vector<at::Tensor>& inputs,
                                           std::index_sequence<kIndex...>) {
    using First = std::remove_cvref_t<std::tuple_element_t<0, std::tuple<Args..., void>>>;
    if constexpr (sizeof...(Args) == 1 && std::is_same_v<First, std::vector<at::Tensor>>) {
      return wrap::tensors_of(module.forward(inputs));
    } else {
      static_assert((std::is_same_v<std::remove_cvref_t<Args>, at::Tensor> && ...),
                    "cadre::PipelineStage: forward() must take tensors, or one std::vector of "
                    "tensors; wrap it into a function of a std::vector otherwise");
      check_num_inputs(inputs.size(), sizeof...(Args));
      auto given = inputs;  // forward() may take its argument by value or by reference
      return wrap::tensors_of(module.forward(given[kIndex]...));
    }
  }

  template <typename Holder>
  static TensorFunction function_of(const Holder& holder) {
    if (!holder) return nullptr;
    return [holder](const std::vector<at::Tensor>& inputs) {
      auto& module = const_cast<std::remove_cvref_t<decltype(*holder)>&>(*holder);
      using Module = std::remove_cvref_t<decltype(module)>;
      if constexpr (std::is_same_v<wrap::ForwardPointer<Module>, wrap::NoSingleForward>) {
        check_num_inputs(inputs.size(), 1);
        return wrap::tensors_of(module.forward(inputs[0]));
      } else {
        return call(module, inputs, wrap::ForwardPointer<Module>());
      }
    };
  }

  TensorFunction function_;
  std::shared_ptr<const torch::nn::Module> module_;
  std::vector<NamedTensor> parameters_;
  std::vector<at::Tensor> buffers_;  // a recomputation does not change them a second time
  PipelineStageOptions options_;
};

}  // namespace cadre
