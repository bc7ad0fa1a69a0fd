// Finds the tensors in what a module's forward() is given and returns.
//
// Threads: pure function. Blocking: never. Errors: none; a type that is not known holds none.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace cadre {

inline void append_tensors(const at::Tensor& tensor, std::vector<at::Tensor>& found) {
  if (tensor.defined()) found.push_back(tensor);
}

template <typename T>
  requires(!std::is_convertible_v<const T&, const at::Tensor&>)
void append_tensors(const T& value, std::vector<at::Tensor>& found) {
  if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&found](const auto&... parts) { (append_tensors(parts, found), ...); }, value);
  } else if constexpr (requires { value.has_value(); }) {
    if (value.has_value()) append_tensors(*value, found);
  } else if constexpr (requires { value.begin(), value.end(); }) {
    for (const auto& part : value) append_tensors(part, found);
  }
}

template <typename T>
std::vector<at::Tensor> tensors_of(const T& value) {
  std::vector<at::Tensor> found;
  append_tensors(value, found);
  return found;
}

// size(0) of the first tensor; 1 where there is none, or none with a dimension.
template <typename... Args>
int64_t num_rows_of(const Args&... args) {
  std::vector<at::Tensor> found;
  ((found.empty() ? append_tensors(args, found) : void()), ...);
  return found.empty() || found[0].dim() == 0 ? 1 : found[0].size(0);
}

}  // namespace cadre
