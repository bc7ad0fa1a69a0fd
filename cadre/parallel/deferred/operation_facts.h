// Describes properties of libtorch's operations that the recorder needs and that the schemas do not
// contain.
//
// Threads: any.
#pragma once

#include <ATen/core/function_schema.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace cadre {

// Returns whether the operation overwrites every element of its first argument without reading it.
inline bool is_fill(const c10::FunctionSchema& schema) {
  static constexpr std::array<std::string_view, 11> kFills = {
      "aten::uniform_",     "aten::normal_",    "aten::random_", "aten::bernoulli_",
      "aten::exponential_", "aten::geometric_", "aten::cauchy_", "aten::log_normal_",
      "aten::zero_",        "aten::fill_",      "aten::copy_"};
  return std::ranges::find(kFills, schema.name()) != kFills.end();
}

// Returns whether the operation uses only the sizes of its tensor arguments, not their values.
inline bool is_random_like(const c10::FunctionSchema& schema) {
  static constexpr std::array<std::string_view, 3> kRandomLike = {
      "aten::rand_like", "aten::randn_like", "aten::randint_like"};
  return std::ranges::find(kRandomLike, schema.name()) != kRandomLike.end();
}

inline bool is_generator(const c10::Argument& argument) {
  return argument.name() == "generator";
}

}  // namespace cadre
