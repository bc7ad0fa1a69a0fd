#include "cadre/tensor/hooks/autocast.h"

#include <ATen/autocast_mode.h>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/device/device_search.h"

namespace cadre {
namespace wrap {

AutocastState::AutocastState() {
  const auto add = [this](c10::DeviceType type) {
    of_types_.push_back({.type = type,
                         .is_enabled = at::autocast::is_autocast_enabled(type),
                         .dtype = at::autocast::get_autocast_dtype(type)});
  };
  add(at::kCPU);
  for (const c10::DeviceType type : device::loaded_device_types()) add(type);
}

void AutocastState::restore() const {
  for (const OfType& of : of_types_) {
    at::autocast::set_autocast_enabled(of.type, of.is_enabled);
    at::autocast::set_autocast_dtype(of.type, of.dtype);
  }
}

void AutocastState::use(at::ScalarType dtype) const {
  const bool is_enabled = dtype != at::kFloat;
  for (const OfType& of : of_types_) {
    if (is_enabled) at::autocast::set_autocast_dtype(of.type, dtype);
    at::autocast::set_autocast_enabled(of.type, is_enabled);
  }
}

}  // namespace wrap

Autocast::Autocast(at::ScalarType dtype) {
  if (dtype != at::kBFloat16 && dtype != at::kHalf && dtype != at::kFloat) {
    throw Error(ErrorCode::kInvalidArgument,
                format("Autocast: {} is no dtype to cast to; use bfloat16 or float16, or float32 "
                       "to switch autocast off",
                       c10::toString(dtype)));
  }
  at::autocast::increment_nesting();
  before_.use(dtype);
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  before_.restore();
}

}  // namespace cadre
