// Constructs a module without memory for the values of its tensors, and computes the values later.
//
//   Gpt gpt = cadre::defer_init([&] { return Gpt(config); });
//   cadre::FullyShardedDataParallel model{gpt, world};  // or cadre::materialize(*gpt);
//
// Inside defer_init() every tensor that an operation creates on the CPU is a deferred tensor: a
// meta tensor (sizes and dtype, no values) whose operations are recorded. Materializing it means to
// run the recorded operations on which its values depend. It then has the same bits as after
// construction without defer_init() with the same seed. To achieve this, a random operation is run
// when it is recorded, on memory that is freed at once, so that the generator advances as in plain
// construction. Materializing runs it again with the generator state that was recorded.
// docs/decisions/0014 describes what is recorded and what is an error.
//
// Operations on deferred tensors are recorded outside of defer_init(), too, until the first tensor
// is materialized: apply(init_weights) and to(torch::kBFloat16) work in both places.
//
// Threads: a deferred module must be used by one thread at a time; several threads may each
// construct and materialize their own module. Lifetime: the recorded operations are kept as long as
// a deferred tensor that depends on them. Errors: kInvalidArgument for an operation that cannot be
// recorded, and for a tensor on the meta device that was not made by defer_init(). A direct access
// to the memory of a deferred tensor throws c10::Error, whose text says what to do. Source:
// torchdistx.deferred_init.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
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

  // Records what the program has written directly to the memory of small tensors made by empty().
  // Throws kInvalidArgument if it wrote after an operation had used the tensor.
  void finish();

 private:
  std::shared_ptr<Tape> tape_;
  std::shared_ptr<Tape> outer_;  // the tape of the enclosing scope
  c10::impl::IncludeDispatchKeyGuard includes_;
};

// Calls `make` in a DeferredScope and returns its result: a module, a holder or a pointer to a
// module.
template <std::invocable Make>
auto defer_init(Make&& make) {
  DeferredScope scope;
  auto made = std::forward<Make>(make)();
  scope.finish();
  return made;
}

CADRE_EXPORT bool is_deferred(const at::Tensor& tensor);

// Computes the values of the deferred parameters and buffers of a module and its submodules. The
// tensors stay the same objects, and tensors that shared memory share it again. Other tensors do
// not change.
CADRE_EXPORT void materialize(const torch::nn::Module& module);
// Does the same, and moves the values of all parameters and buffers to `device`. They are computed
// on the CPU, so they have the bits that the module would have there.
CADRE_EXPORT void materialize(const torch::nn::Module& module, c10::Device device);

template <typename Holder>
  requires requires(const Holder& holder) {
    { *holder.ptr() } -> std::convertible_to<const torch::nn::Module&>;
  }
void materialize(const Holder& module) {
  materialize(*module.ptr());
}

template <typename Holder>
  requires requires(const Holder& holder) {
    { *holder.ptr() } -> std::convertible_to<const torch::nn::Module&>;
  }
void materialize(const Holder& module, c10::Device device) {
  materialize(*module.ptr(), device);
}

}  // namespace cadre
