// Text formatting for code with and without torch, with fmt's syntax: format("rank {} of {}", 1,
// 2).
//
// Threads: any. Blocking: never. Errors: a malformed pattern throws Error(kInternal).
// The arguments are type-erased here and handed to fmt inside format.cpp, because the torch wheel
// ships its own, newer fmt headers that shadow the system's (docs/decisions).
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre {

using FormatValue = std::variant<int64_t, uint64_t, double, bool, char, std::string_view>;

CADRE_EXPORT std::string format_values(std::string_view pattern,
                                       std::span<const FormatValue> values);

template <typename T>
FormatValue to_format_value(const T& value) {
  using Plain = std::remove_cvref_t<T>;
  if constexpr (std::is_same_v<Plain, bool> || std::is_same_v<Plain, char>) {
    return value;
  } else if constexpr (std::is_same_v<Plain, Rank>) {
    return static_cast<int64_t>(value.value);
  } else if constexpr (std::is_same_v<Plain, DType> || std::is_same_v<Plain, ReduceOp> ||
                       std::is_same_v<Plain, OpKind>) {
    return to_string(value);
  } else if constexpr (std::signed_integral<Plain>) {
    return static_cast<int64_t>(value);
  } else if constexpr (std::unsigned_integral<Plain>) {
    return static_cast<uint64_t>(value);
  } else if constexpr (std::floating_point<Plain>) {
    return static_cast<double>(value);
  } else {
    return std::string_view(value);
  }
}

// Accepts `{}` and fmt's format specs for integers, floating-point numbers, bools, chars, texts,
// Rank and the enums of types.h.
template <typename... Args>
std::string format(std::string_view pattern, const Args&... args) {
  const std::initializer_list<FormatValue> values = {to_format_value(args)...};
  return format_values(pattern, std::span<const FormatValue>(values.begin(), values.size()));
}

// Returns a list of sizes or strides as messages show it, for example "(4, 3)".
CADRE_EXPORT std::string list_of(std::span<const int64_t> values);

}  // namespace cadre
