// Runs the matrix products and convolutions of a scope in a lower precision, on the CPU and on
// devices. Autograd records the casts.
//
// Threads: the state is that of the calling thread; the guard is made and destroyed on it.
// Blocking: never. Lifetime: the scope; guards may be nested. Errors: kInvalidArgument for a dtype
// that autocast does not support. docs/guide/training/gradients.md has a whole training step.
// Source: torch.autocast.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <vector>

#include "cadre/core/base/export.h"

namespace cadre {

namespace wrap {

// The autocast settings of the calling thread: those for the CPU and for each type of device whose
// library of libtorch is loaded.
class CADRE_EXPORT AutocastState {
 public:
  // Reads the present settings.
  AutocastState();
  // Makes these settings those of the calling thread.
  void restore() const;
  // Makes the calling thread use `dtype` for all these types of devices; float32 switches autocast
  // off.
  void use(at::ScalarType dtype) const;

 private:
  struct OfType {
    c10::DeviceType type;
    bool is_enabled;
    at::ScalarType dtype;
  };
  std::vector<OfType> of_types_;
};

}  // namespace wrap

class [[nodiscard]] CADRE_EXPORT Autocast {
 public:
  // dtype: bfloat16 or float16 for operations on tensors of the CPU and of devices; float32
  // switches autocast off in the scope.
  explicit Autocast(at::ScalarType dtype = at::kBFloat16);
  // Restores the previous state. The end of the outermost scope drops the casts of parameters that
  // autocast has cached.
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  wrap::AutocastState before_;
};

}  // namespace cadre
