// Replaces the tensors among the arguments and in the result of a module's forward().
//
// Threads: pure functions. Blocking: never. Errors: those of the function.
// Replaces tensors, also inside tuples, pairs, arrays, vectors, maps and optionals. Values of other
// types, such as a struct of the program, are passed on unchanged.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cadre::wrap {

// True if replace_tensors() can find a tensor in a T.
template <typename T>
struct HoldsReplaceableTensors : std::false_type {};
template <>
struct HoldsReplaceableTensors<at::Tensor> : std::true_type {};
template <typename T>
struct HoldsReplaceableTensors<std::optional<T>> : HoldsReplaceableTensors<T> {};
template <typename T>
struct HoldsReplaceableTensors<std::vector<T>> : HoldsReplaceableTensors<T> {};
template <typename T, size_t kSize>
struct HoldsReplaceableTensors<std::array<T, kSize>> : HoldsReplaceableTensors<T> {};
template <typename Key, typename T>
struct HoldsReplaceableTensors<std::map<Key, T>> : HoldsReplaceableTensors<T> {};
template <typename Key, typename T>
struct HoldsReplaceableTensors<std::unordered_map<Key, T>> : HoldsReplaceableTensors<T> {};
template <typename A, typename B>
struct HoldsReplaceableTensors<std::pair<A, B>>
    : std::disjunction<HoldsReplaceableTensors<A>, HoldsReplaceableTensors<B>> {};
template <typename... Parts>
struct HoldsReplaceableTensors<std::tuple<Parts...>>
    : std::disjunction<HoldsReplaceableTensors<Parts>...> {};

template <typename T>
inline constexpr bool kHoldsReplaceableTensors =
    HoldsReplaceableTensors<std::remove_cvref_t<T>>::value;

// Replaces in place: each defined tensor becomes function(tensor).
template <typename T, typename Function>
void replace_tensors(T& value, Function&& function) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (value.defined()) value = function(value);
  } else if constexpr (!kHoldsReplaceableTensors<T>) {
    return;
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&function](auto&... parts) { (replace_tensors(parts, function), ...); }, value);
  } else if constexpr (requires { value.has_value(); }) {
    if (value.has_value()) replace_tensors(*value, function);
  } else if constexpr (requires { typename T::mapped_type; }) {
    for (auto& entry : value) replace_tensors(entry.second, function);
  } else {
    for (auto& part : value) replace_tensors(part, function);
  }
}

// Returns the argument to pass to a function whose parameter has the type Given: a copy of `value`
// with replaced tensors. Returns `value` itself if its type holds no tensor or Given is a mutable
// reference.
template <typename Given, typename Function>
decltype(auto) with_tensors(std::remove_reference_t<Given>& value, Function&& function) {
  constexpr bool kIsMutableReference =
      std::is_lvalue_reference_v<Given> && !std::is_const_v<std::remove_reference_t<Given>>;
  if constexpr (kHoldsReplaceableTensors<Given> && !kIsMutableReference) {
    std::remove_cvref_t<Given> copy = value;
    replace_tensors(copy, function);
    return copy;
  } else {
    return static_cast<Given&&>(value);
  }
}

}  // namespace cadre::wrap
