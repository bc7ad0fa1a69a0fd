#include "cadre/tensor/hooks/autocast.h"

#include <ATen/autocast_mode.h>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {

Autocast::Autocast(at::ScalarType dtype)
    : was_enabled_(at::autocast::is_autocast_enabled(at::kCPU)),
      previous_dtype_(at::autocast::get_autocast_dtype(at::kCPU)) {
  if (dtype != at::kBFloat16 && dtype != at::kHalf && dtype != at::kFloat) {
    throw Error(ErrorCode::kInvalidArgument,
                format("Autocast: {} is no dtype to cast to; use bfloat16 or float16, or float32 "
                       "to switch autocast off",
                       c10::toString(dtype)));
  }
  const bool is_enabled = dtype != at::kFloat;
  at::autocast::increment_nesting();
  if (is_enabled) at::autocast::set_autocast_dtype(at::kCPU, dtype);
  at::autocast::set_autocast_enabled(at::kCPU, is_enabled);
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, was_enabled_);
  at::autocast::set_autocast_dtype(at::kCPU, previous_dtype_);
}

}  // namespace cadre
