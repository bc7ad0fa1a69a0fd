// Constructs a module without memory for its values, and gives it the values later.
//
//   Gpt gpt = cadre::defer_init([&] { return Gpt(config); });
//   cadre::FullyShardedDataParallel model{gpt, world};  // or cadre::materialize(*gpt);
//
// Inside defer_init() every tensor that an operation creates on the CPU is a deferred tensor: a
// meta tensor (sizes and dtype, no values) whose operations are recorded. To materialize it is to
// run the recorded operations that its values depend on. It then has the bits that construction
// without defer_init() would have given it with the same seed: a random operation is run once when
// it is recorded, on memory that is freed at once, so that the generator advances as in plain
// construction, and is repeated with the state that it had before. docs/decisions/0014 describes
// what is recorded and what is refused.
//
// Operations on deferred tensors are recorded outside of defer_init(), too, until the first tensor
// is materialized: apply(init_weights) and to(torch::kBFloat16) work in both places.
//
// Threads: a deferred module is used by one thread at a time; several threads may each construct
// and materialize their own. Blocking: never.
// Lifetime: the record lives as long as a deferred tensor that it describes.
// Errors: kInvalidArgument for an operation that cannot be recorded, and for a tensor on the meta
// device that was not made by defer_init(). libtorch throws a sentence where the memory of a
// deferred tensor is accessed directly.
// Source: torchdistx.deferred_init.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

#include "cadre/core/base/export.h"

namespace torch::nn {
class Module;
}

namespace cadre {

class Tape;

// While this object exists, tensors that this thread creates are deferred. Scopes may nest.
class CADRE_EXPORT DeferredScope {
 public:
  DeferredScope();
  ~DeferredScope();
  DeferredScope(const DeferredScope&) = delete;
  DeferredScope& operator=(const DeferredScope&) = delete;

  // Ends the recording of direct writes to memory; throws kInvalidArgument if one came too late.
  void finish();

 private:
  std::shared_ptr<Tape> tape_;
  std::shared_ptr<Tape> outer_;  // the tape of the enclosing scope
  c10::impl::IncludeDispatchKeyGuard includes_;
};

// Returns what `make` returns: a module, a holder, a pointer to a module.
template <std::invocable Make>
auto defer_init(Make&& make) {
  DeferredScope scope;
  auto made = std::forward<Make>(make)();
  scope.finish();
  return made;
}

CADRE_EXPORT bool is_deferred(const at::Tensor& tensor);

// Gives the deferred parameters and buffers of a module, and of the modules below it, their values.
// They keep their identity; tensors that shared memory share it again. Without deferred tensors it
// does nothing.
CADRE_EXPORT void materialize(const torch::nn::Module& module);

template <typename Holder>
  requires requires(const Holder& holder) {
    { *holder.ptr() } -> std::convertible_to<const torch::nn::Module&>;
  }
void materialize(const Holder& module) {
  materialize(*module.ptr());
}

}  // namespace cadre
