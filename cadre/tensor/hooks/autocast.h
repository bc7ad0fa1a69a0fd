// Runs the matrix products and convolutions of a scope in a lower precision. Autograd records the
// casts.
//
// Threads: the state is that of the calling thread; the guard is made and destroyed on it.
// Blocking: never. Lifetime: the scope; guards may be nested. Errors: kInvalidArgument for a dtype
// that CPU autocast does not support. docs/guide/training/gradients.md has a whole training step.
// Source: torch.autocast.
#pragma once

#include <ATen/core/Tensor.h>

#include "cadre/core/base/export.h"

namespace cadre {

class [[nodiscard]] CADRE_EXPORT Autocast {
 public:
  // dtype: bfloat16 or float16 for operations on CPU tensors; float32 switches autocast off in the
  // scope.
  explicit Autocast(at::ScalarType dtype = at::kBFloat16);
  // Restores the previous state. The end of the outermost scope drops the casts of parameters that
  // autocast has cached.
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool was_enabled_;
  at::ScalarType previous_dtype_;
};

}  // namespace cadre
