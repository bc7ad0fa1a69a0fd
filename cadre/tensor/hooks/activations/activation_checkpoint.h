// Activation checkpointing: a module whose forward() keeps only its arguments; backward computes
// the forward again to get what it needs.
//
//   using Block = torch::nn::ModuleHolder<cadre::ActivationCheckpoint<BlockImpl>>;
//
// An ActivationCheckpoint<M> is an M with the same constructors, names of parameters and signature
// of forward(). For a unit of FullyShardedDataParallel write
// ShardUnit<ActivationCheckpoint<BlockImpl>>. Without grad it only calls M::forward().
//
// The second forward draws the same random numbers, from the default generators of the CPU, of the
// current device of each type that the program uses, and of the devices of its arguments and
// buffers, and has the same autocast state. Each checkpointed
// module runs a backward of its own inside the outer backward. So a parameter that two checkpointed
// modules share gets its gradient in two steps, which DistributedDataParallel refuses with an
// error. autograd::grad(), and backward() with a list of inputs, throw at the module, because they
// would add to the gradients of parameters that were not requested. If forward() changes a buffer
// in place, such as BatchNorm's statistics, the change by the second forward is undone. A tensor
// that forward() stores in a member, for example for an extra loss, has no autograd graph; return
// it instead.
//
// Threads: as the module. Blocking: as M::forward(). Lifetime: a graph keeps the arguments, and
// refers to the module, which must live until backward. Errors: those of M::forward(), also from
// backward(); kInvalidArgument if forward() changes an argument in place, because the second
// forward would get the changed values, and from autograd::grad(); c10::Error if an argument was
// changed in place between forward and backward.
// Source: T. Chen et al., arXiv:1604.06174; torch.utils.checkpoint with use_reentrant=True.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/hooks/forward_signature.h"
#include "cadre/tensor/hooks/map_tensors.h"
#include "cadre/tensor/hooks/output_tensors.h"

namespace torch::autograd {
struct Node;
}

namespace cadre {

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// Calls function(inputs) without grad now, and again with grad in backward. All inputs and outputs
// must be defined. buffers: tensors that the function may change; the changes of the second call
// are undone.
CADRE_EXPORT std::vector<at::Tensor> checkpoint(TensorFunction function,
                                                const std::vector<at::Tensor>& inputs,
                                                std::vector<at::Tensor> buffers = {});
// Returns whether the node was made by checkpoint(). The backward of such a node computes the
// gradients of the inputs and of all parameters that the function uses.
CADRE_EXPORT bool is_checkpoint(const torch::autograd::Node& node);
// Allows backward() with a list of inputs to go through this checkpoint. It then adds to the
// gradients of all parameters of the checkpoint, also of those that are not in the list. REQUIRES:
// is_checkpoint().
CADRE_EXPORT void allow_partial_backward(torch::autograd::Node& checkpoint);
// Returns whether grad mode is on. Otherwise a forward saves no activations, and checkpointing has
// no effect.
CADRE_EXPORT bool checkpointing_is_useful();

// The body of ActivationCheckpoint<M>::forward().
template <typename Output, typename... Args, typename Call>
Output call_checkpointed(const Call& forward, std::vector<at::Tensor> buffers,
                         std::remove_reference_t<Args>&... args) {
  static_assert((std::is_copy_constructible_v<std::remove_cvref_t<Args>> && ...) &&
                    ((wrap::kHoldsReplaceableTensors<Args> ||
                      wrap::kHoldsNoTensor<std::remove_cvref_t<Args>>)&&...),
                "cadre::ActivationCheckpoint<M>: the arguments of M::forward() are kept until "
                "backward, so they must be copyable, and tensors among them tensors, or in tuples, "
                "pairs, arrays, vectors, maps and optionals");
  static_assert(
      wrap::kHoldsReplaceableTensors<Output> && std::is_same_v<Output, std::remove_cvref_t<Output>>,
      "cadre::ActivationCheckpoint<M>: M::forward() must return a tensor, or a tuple, "
      "pair, array, vector, map or optional of tensors, by value");
  static_assert(
      ((!std::is_lvalue_reference_v<Args> || std::is_const_v<std::remove_reference_t<Args>>)&&...),
      "cadre::ActivationCheckpoint<M>: M::forward() takes an argument by mutable "
      "reference, which a second forward would change a second time");
  if (!checkpointing_is_useful()) return forward(static_cast<Args&&>(args)...);
  // The output of the last call of forward(): the first call now, and the second one in backward.
  const auto output = std::make_shared<std::optional<Output>>();
  const auto kept = std::make_shared<std::tuple<std::remove_cvref_t<Args>...>>(args...);
  std::vector<at::Tensor> inputs;
  std::apply([&](const auto&... parts) { (wrap::append_tensors(parts, inputs), ...); }, *kept);
  const auto without_tensor = [](const at::Tensor& tensor) { return tensor.new_empty({0}); };
  const auto results = checkpoint(
      [forward, output, kept](const std::vector<at::Tensor>& given) {
        auto again = *kept;
        wrap::replace_tensors(again,
                              [&, i = size_t{0}](const at::Tensor&) mutable { return given[i++]; });
        output->emplace(std::apply(
            [&](auto&... parts) { return forward(static_cast<Args&&>(parts)...); }, again));
        return wrap::tensors_of(**output);
      },
      inputs, std::move(buffers));
  // The tensors are dropped from the kept arguments: the graph saves them as inputs and checks that
  // they are not changed in place.
  wrap::replace_tensors(*kept, without_tensor);
  Output result = std::move(**output);
  output->reset();
  wrap::replace_tensors(result,
                        [&, i = size_t{0}](const at::Tensor&) mutable { return results[i++]; });
  return result;
}

namespace wrap {

// The implementation of ActivationCheckpoint<M>, specialized for the type of &M::forward.
template <typename M, typename Forward>
class CheckpointAround : public M {
  static_assert(!std::is_same_v<Forward, NoSingleForward>,
                "cadre::ActivationCheckpoint<M>: M must have exactly one public forward(), which "
                "is not a template (torch::nn::Sequential has a template): put the module into one "
                "of your own whose forward() has one signature");
};

template <typename M, typename C, typename Output, typename... Args>
class CheckpointAround<M, Output (C::*)(Args...)> : public M {
 public:
  using M::M;
  Output forward(Args... args) {
    return call_checkpointed<Output, Args...>(
        [this](auto&&... given) -> Output {
          return M::forward(std::forward<decltype(given)>(given)...);
        },
        this->buffers(), args...);
  }
};

template <typename M, typename C, typename Output, typename... Args>
class CheckpointAround<M, Output (C::*)(Args...) const> : public M {
 public:
  using M::M;
  Output forward(Args... args) const {
    return call_checkpointed<Output, Args...>(
        [this](auto&&... given) -> Output {
          return M::forward(std::forward<decltype(given)>(given)...);
        },
        this->buffers(), args...);
  }
};

}  // namespace wrap

template <typename M>
class ActivationCheckpoint : public wrap::CheckpointAround<M, wrap::ForwardPointer<M>> {
  using Around = wrap::CheckpointAround<M, wrap::ForwardPointer<M>>;

 public:
  using Around::Around;
};

}  // namespace cadre
