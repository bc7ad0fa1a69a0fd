// Takes tensors by name from a saved state, and throws for what is missing, of other sizes, or not
// used.
//
// Threads: one. Blocking: never. Lifetime: refers to the state. Errors: kInvalidArgument, with the
// name of the tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cadre::averaging {

using NamedState = std::vector<std::pair<std::string, at::Tensor>>;

class SavedTensors {
 public:
  // call: the name of the program's call, with which errors begin; static text.
  SavedTensors(std::string_view call, const NamedState& state) : call_(call), state_(state) {}

  // Returns the tensor of this name. Throws unless it has the sizes and the dtype.
  at::Tensor take(const std::string& name, at::IntArrayRef sizes, at::ScalarType dtype);
  // Returns the tensor of this name, a vector of bytes of any size.
  at::Tensor take_bytes(const std::string& name);
  // Returns the number that a 0-dim tensor of int64 has. Throws if it is negative.
  int64_t take_count(const std::string& name);
  // Returns the tensors whose names begin with the prefix, without it.
  NamedState take_all(const std::string& prefix);
  // Throws if a tensor was not taken.
  void check_all_taken() const;

 private:
  const at::Tensor& find(const std::string& name) const;

  std::string_view call_;
  const NamedState& state_;
  size_t num_taken_ = 0;
};

}  // namespace cadre::averaging
