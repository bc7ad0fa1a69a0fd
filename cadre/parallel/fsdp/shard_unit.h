// Makes a module type M into a type that can be a unit of FullyShardedDataParallel: a module whose
// parameters are gathered together before its forward and freed afterwards.
//
//   struct BlockImpl : torch::nn::Module { Tensor forward(const Tensor& x); ... };
//   using Block = torch::nn::ModuleHolder<cadre::ShardUnit<BlockImpl>>;
//   ...
//   for (auto& block : gpt->blocks) cadre::fully_shard(block);   // or a wrap policy, wrap_policy.h
//   cadre::FullyShardedDataParallel model{gpt, world};
//
// A ShardUnit<M> is an M with the same constructors, parameter names and signature of forward(), so
// it can be used wherever an M can: in torch::nn::Sequential, AnyModule and holders. Until a
// wrapper makes it a unit it only calls M::forward(). A copy that clone() makes is not a unit.
// Calls of ShardUnit<M>::forward() must pass all arguments, because default arguments of
// M::forward() are lost.
//
// Threads: as the module. Blocking: forward() of a unit is a collective, because it gathers, and
// waits until the group's deadline. Lifetime: a unit does not keep its wrapper alive. Errors:
// cadre::Error; kInvalidArgument if a unit is called outside of its wrapper's forward() or after
// the wrapper's destruction; see docs/guide/parallel/fsdp.md. Source:
// torch.distributed.fsdp.fully_shard.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/fsdp/options.h"
#include "cadre/tensor/hooks/forward_signature.h"
#include "cadre/tensor/hooks/map_tensors.h"
#include "cadre/tensor/hooks/output_tensors.h"

namespace cadre {

namespace parallel {

class ShardedUnits;

// The base class of all ShardUnit<M>, by which a wrapper finds the units of a model.
class CADRE_EXPORT ShardUnitBase {
 public:
  ShardUnitBase() = default;
  ShardUnitBase(const ShardUnitBase&) noexcept : ShardUnitBase() {}
  ShardUnitBase& operator=(const ShardUnitBase&) noexcept { return *this; }
  virtual ~ShardUnitBase() = default;

  // What fully_shard() and the wrapper have stored in the unit.
  struct Binding {
    bool is_declared = false;  // fully_shard() was called for the unit
    // A wrapper has sharded the model, whether or not this is one of its units.
    bool is_wrapped = false;
    FullyShardOptions options = {};
    bool is_sharded = false;
    std::weak_ptr<ShardedUnits> units = {};
    size_t index = 0;
  };
  Binding& binding() { return binding_; }
  const Binding& binding() const { return binding_; }

 private:
  Binding binding_;
};

// Returns the tensor, cast to `dtype` if a dtype is given and the tensor is floating-point.
CADRE_EXPORT at::Tensor cast_floating(const at::Tensor& tensor,
                                      std::optional<c10::ScalarType> dtype);

// One call of a unit's forward(). If this object is destroyed before returned() was called, the
// forward has thrown.
class CADRE_EXPORT UnitCall {
 public:
  // Gathers the unit's parameters. Throws kInvalidArgument if no wrapper has sharded the unit, or
  // if the wrapper was destroyed. inputs: the tensors in the arguments of forward().
  UnitCall(const ShardUnitBase& unit, std::span<const at::Tensor> inputs);
  ~UnitCall();
  UnitCall(const UnitCall&) = delete;
  UnitCall& operator=(const UnitCall&) = delete;

  void returned(std::span<const at::Tensor> outputs);

  bool casts_inputs() const { return input_dtype_.has_value(); }
  bool casts_outputs() const { return output_dtype_.has_value(); }
  at::Tensor cast_input(const at::Tensor& tensor) const {
    return cast_floating(tensor, input_dtype_);
  }
  at::Tensor cast_output(const at::Tensor& tensor) const {
    return cast_floating(tensor, output_dtype_);
  }

 private:
  struct State;
  std::unique_ptr<State> state_;  // is null only if the constructor throws
  std::optional<c10::ScalarType> input_dtype_;
  std::optional<c10::ScalarType> output_dtype_;
};

// Implements ShardUnit<M>. Forward is the type of &M::forward, from which the specializations take
// the signature.
template <typename M, typename Forward>
class UnitAround : public M, public ShardUnitBase {
  static_assert(!std::is_same_v<Forward, wrap::NoSingleForward>,
                "cadre::ShardUnit<M>: M must have exactly one public forward(), which is not a "
                "template (torch::nn::Sequential has a template): put the module into one of your "
                "own whose forward() has one signature, and make that the unit");
};

// The body of ShardUnit<M>::forward(): gathers, calls M::forward() and frees. Args: the parameter
// types of M::forward().
template <typename Output, typename... Args, typename Call>
Output call_unit(const ShardUnitBase& unit, Call&& forward,
                 std::remove_reference_t<Args>&... args) {
  static_assert(wrap::tensors_are_known<Output>(),
                "cadre::ShardUnit<M>: the unit must see the tensors that M::forward() returns. "
                "Return a tensor, or a tuple, pair, vector, map or optional of tensors; for a "
                "struct of your own, define std::vector<torch::Tensor> held_tensors(const "
                "YourStruct&) beside it");
  if (!unit.binding().is_sharded && !unit.binding().is_declared) {
    return forward(static_cast<Args&&>(args)...);
  }
  std::vector<at::Tensor> inputs;
  (wrap::append_tensors(args, inputs), ...);
  UnitCall call(unit, inputs);
  const auto cast_input = [&call](const at::Tensor& tensor) { return call.cast_input(tensor); };
  const auto run = [&]() -> Output {
    if (!call.casts_inputs()) return forward(static_cast<Args&&>(args)...);
    return forward(wrap::with_tensors<Args>(args, cast_input)...);
  };
  if constexpr (std::is_void_v<Output>) {
    run();
    call.returned({});
  } else if constexpr (std::is_reference_v<Output>) {
    Output output = run();
    call.returned(wrap::tensors_of(output));
    return output;
  } else {
    Output output = run();
    if (call.casts_outputs()) {
      wrap::replace_tensors(output,
                            [&call](const at::Tensor& tensor) { return call.cast_output(tensor); });
    }
    call.returned(wrap::tensors_of(output));
    return output;
  }
}

template <typename M, typename C, typename Output, typename... Args>
class UnitAround<M, Output (C::*)(Args...)> : public M, public ShardUnitBase {
 public:
  using M::M;
  Output forward(Args... args) {
    return call_unit<Output, Args...>(
        *this,
        [this](auto&&... given) -> Output {
          return M::forward(std::forward<decltype(given)>(given)...);
        },
        args...);
  }
};

template <typename M, typename C, typename Output, typename... Args>
class UnitAround<M, Output (C::*)(Args...) const> : public M, public ShardUnitBase {
 public:
  using M::M;
  Output forward(Args... args) const {
    return call_unit<Output, Args...>(
        *this,
        [this](auto&&... given) -> Output {
          return M::forward(std::forward<decltype(given)>(given)...);
        },
        args...);
  }
};

// A noexcept forward() could not report a failed gather.
template <typename M, typename C, typename Output, typename... Args>
class UnitAround<M, Output (C::*)(Args...) noexcept> : public M, public ShardUnitBase {
  static_assert(!std::is_same_v<M, M>,
                "cadre::ShardUnit<M>: M::forward() is noexcept, but a gather of its parameters can "
                "fail; remove noexcept");
};

}  // namespace parallel

template <typename M>
class ShardUnit : public parallel::UnitAround<M, wrap::ForwardPointer<M>> {
  using Around = parallel::UnitAround<M, wrap::ForwardPointer<M>>;

 public:
  using Around::Around;
};

// Makes the module, a ShardUnit, a unit of the wrapper that is constructed later, with its own
// options. All ranks call this for the same modules. Of nested units, either may be declared first.
// Throws kInvalidArgument for a module that was declared before, that is a unit of a wrapper
// already, or that has no parameters.
CADRE_EXPORT void fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});

namespace parallel {
// Returns *module. Throws kInvalidArgument for null.
CADRE_EXPORT torch::nn::Module& checked_unit(torch::nn::Module* module);
}  // namespace parallel

template <typename Module>
void fully_shard(const std::shared_ptr<Module>& module, const FullyShardOptions& options = {}) {
  fully_shard(parallel::checked_unit(module.get()), options);
}

// Does the same for a module in a holder, such as Block in the example above.
template <typename Holder>
  requires requires { typename Holder::ContainedType; }
void fully_shard(const Holder& holder, const FullyShardOptions& options = {}) {
  static_assert(std::is_base_of_v<parallel::ShardUnitBase, typename Holder::ContainedType>,
                "cadre::fully_shard(module): the module's type must be a unit: declare the holder "
                "as torch::nn::ModuleHolder<cadre::ShardUnit<YourImpl>>");
  fully_shard(holder.ptr(), options);
}

}  // namespace cadre
