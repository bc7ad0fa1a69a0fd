// Finds the tensors among the arguments and in the result of a module's forward().
//
// Threads: pure functions. Blocking: never. tensors_are_known<T>() says at compile time whether all
// tensors in a T can be found, because T consists of known types only.
// Known types are tensors, numbers, strings, and tuples, pairs, arrays, ranges, maps and optionals
// of known types. A struct of your own is known if a function held_tensors(const YourStruct&) is
// declared beside it that returns its tensors as a std::vector<torch::Tensor>.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace cadre::wrap {

template <typename T>
inline constexpr bool kHoldsNoTensor =
    std::is_void_v<T> || std::is_arithmetic_v<T> || std::is_enum_v<T> ||
    std::is_same_v<T, std::string> || std::is_same_v<T, std::string_view> ||
    std::is_same_v<T, const char*> || std::is_same_v<T, std::nullopt_t>;

template <typename T>
concept TensorLike = std::is_convertible_v<const T&, const at::Tensor&>;

template <typename T>
concept SaysItsTensors = requires(const T& value) {
  { held_tensors(value) } -> std::convertible_to<std::vector<at::Tensor>>;
};

template <typename T>
concept TupleLike = requires { std::tuple_size<T>::value; };

template <typename T>
concept OptionalLike = requires(const T& value) { value.has_value(), *value; };

// An item of torch::OrderedDict.
template <typename T>
concept ItemLike = requires(const T& value) { value.key(), value.value(); };

template <typename T>
concept RangeLike = requires(const T& value) { *value.begin(), value.end(); };

template <typename Given>
consteval bool tensors_are_known() {
  using T = std::remove_cvref_t<Given>;
  if constexpr (kHoldsNoTensor<T>) {
    return true;
  } else if constexpr (TensorLike<T> || SaysItsTensors<T>) {
    return true;
  } else if constexpr (TupleLike<T>) {
    return []<size_t... kIndex>(std::index_sequence<kIndex...>) {
      return (tensors_are_known<std::tuple_element_t<kIndex, T>>() && ...);
    }(std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (OptionalLike<T>) {
    return tensors_are_known<decltype(*std::declval<const T&>())>();
  } else if constexpr (ItemLike<T>) {
    return tensors_are_known<decltype(std::declval<const T&>().value())>();
  } else if constexpr (RangeLike<T>) {
    using Element = std::remove_cvref_t<decltype(*std::declval<const T&>().begin())>;
    if constexpr (std::is_same_v<Element, T>)
      return false;  // a std::filesystem::path is a range of paths
    else
      return tensors_are_known<Element>();
  } else {
    return false;
  }
}

template <typename T>
void append_tensors(const T& value, std::vector<at::Tensor>& found) {
  if constexpr (kHoldsNoTensor<T> || !tensors_are_known<T>()) {
    return;
  } else if constexpr (TensorLike<T>) {
    const at::Tensor& tensor = value;
    if (tensor.defined()) found.push_back(tensor);
  } else if constexpr (SaysItsTensors<T>) {
    for (const at::Tensor& tensor : held_tensors(value)) append_tensors(tensor, found);
  } else if constexpr (TupleLike<T>) {
    std::apply([&found](const auto&... parts) { (append_tensors(parts, found), ...); }, value);
  } else if constexpr (OptionalLike<T>) {
    if (value.has_value()) append_tensors(*value, found);
  } else if constexpr (ItemLike<T>) {
    append_tensors(value.value(), found);
  } else {
    for (const auto& part : value) append_tensors(part, found);
  }
}

template <typename T>
std::vector<at::Tensor> tensors_of(const T& value) {
  std::vector<at::Tensor> found;
  append_tensors(value, found);
  return found;
}

// Returns the batch size: size(0) of the first tensor that is not 0-dim (a 0-dim tensor, such as a
// temperature, is no batch). Without such a tensor returns 1, or nullopt if an argument has an
// unknown type, which may hold a tensor.
template <typename... Args>
std::optional<int64_t> num_rows_of(const Args&... args) {
  std::vector<at::Tensor> found;
  std::optional<int64_t> num_rows;
  const auto look = [&](const auto& arg) {
    if (num_rows) return;
    found.clear();
    append_tensors(arg, found);
    for (const at::Tensor& tensor : found) {
      if (tensor.dim() == 0) continue;
      num_rows = tensor.size(0);
      return;
    }
  };
  (look(args), ...);
  if (num_rows || !(tensors_are_known<Args>() && ...)) return num_rows;
  return 1;
}

}  // namespace cadre::wrap
