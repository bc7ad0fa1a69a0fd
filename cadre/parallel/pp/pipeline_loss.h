// The loss of a microbatch: a function of the last stage's outputs and of the targets.
//
// Lifetime: a value that keeps the function. Errors: a compile-time error for a function that takes
// neither two tensors nor two std::vectors of tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

namespace cadre {

class PipelineLoss {
 public:
  using Tensors = std::vector<at::Tensor>;

  // Makes an empty loss, for ranks that do not have the last stage.
  PipelineLoss() = default;

  // `function` is function(output, target) of tensors, or function(outputs, targets) of vectors of
  // tensors. It returns the mean over the rows of the microbatch, shape (). A null std::function or
  // function pointer makes an empty loss. If the function returns a mean over only some of the
  // rows, as cross_entropy() with ignore_index does, the pipeline still weights it by all rows of
  // the microbatch; the guide says how to avoid that.
  template <typename Function>
    requires(!std::same_as<std::remove_cvref_t<Function>, PipelineLoss>)
  PipelineLoss(Function function) {  // NOLINT: implicit by design
    if constexpr (std::is_pointer_v<Function> || requires { function.target_type(); }) {
      if (!function) return;
    }
    if constexpr (std::invocable<Function&, const Tensors&, const Tensors&>) {
      function_ = std::move(function);
    } else {
      static_assert(std::invocable<Function&, const at::Tensor&, const at::Tensor&>,
                    "cadre::PipelineLoss: a loss takes (output, target), both tensors or both "
                    "std::vectors of tensors");
      function_ = [function = std::move(function)](const Tensors& outputs,
                                                   const Tensors& targets) mutable {
        return at::Tensor(function(outputs.at(0), targets.at(0)));
      };
    }
  }

  explicit operator bool() const { return function_ != nullptr; }
  at::Tensor operator()(const Tensors& outputs, const Tensors& targets) const {
    return function_(outputs, targets);
  }

 private:
  std::function<at::Tensor(const Tensors&, const Tensors&)> function_;
};

}  // namespace cadre
