#include "cadre/parallel/averaging/saved_tensors.h"

#include <algorithm>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::averaging {

const at::Tensor& SavedTensors::find(const std::string& name) const {
  const auto found = std::ranges::find(state_, name, [](const auto& entry) { return entry.first; });
  if (found == state_.end() || !found->second.defined()) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: the state has no tensor \"{}\". Pass what state() has returned for "
                       "the same model and options",
                       call_, name));
  }
  return found->second;
}

at::Tensor SavedTensors::take(const std::string& name, at::IntArrayRef sizes,
                              at::ScalarType dtype) {
  const at::Tensor& found = find(name);
  if (found.sizes() != sizes || found.scalar_type() != dtype) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: \"{}\" has the sizes {} and the dtype {}; expected {} and {}. Pass "
                       "what state() has returned for the same model",
                       call_, name, c10::str(found.sizes()), c10::toString(found.scalar_type()),
                       c10::str(sizes), c10::toString(dtype)));
  }
  ++num_taken_;
  return found;
}

at::Tensor SavedTensors::take_bytes(const std::string& name) {
  return take(name, {find(name).numel()}, at::kByte);
}

int64_t SavedTensors::take_count(const std::string& name) {
  const auto count = take(name, {}, at::kLong).item<int64_t>();
  if (count >= 0) return count;
  throw Error(
      ErrorCode::kInvalidArgument,
      format("{}: \"{}\" is {}; expected 0 or more. The state is damaged", call_, name, count));
}

NamedState SavedTensors::take_all(const std::string& prefix) {
  NamedState taken;
  for (const auto& [name, tensor] : state_) {
    if (!name.starts_with(prefix)) continue;
    taken.emplace_back(name.substr(prefix.size()), tensor);
    ++num_taken_;
  }
  return taken;
}

void SavedTensors::check_all_taken() const {
  if (num_taken_ == state_.size()) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: the state has {} tensors, of which this model with its options uses {}. "
                     "Pass what state() has returned for the same model and options",
                     call_, state_.size(), num_taken_));
}

}  // namespace cadre::averaging
