// Describes properties of libtorch's operations that are not in their schemas and that the recorder
// needs.
//
// Threads: pure functions. Blocking: never. Errors: none.
#pragma once

#include <ATen/core/alias_info.h>
#include <ATen/core/function_schema.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace cadre {

// Returns whether the operation gives every element of its first argument a value that does not
// depend on the old one.
inline bool is_fill(const c10::FunctionSchema& schema) {
  static constexpr std::array<std::string_view, 11> kFills = {
      "aten::uniform_",     "aten::normal_",    "aten::random_", "aten::bernoulli_",
      "aten::exponential_", "aten::geometric_", "aten::cauchy_", "aten::log_normal_",
      "aten::zero_",        "aten::fill_",      "aten::copy_"};
  return std::ranges::find(kFills, schema.name()) != kFills.end();
}

// Returns whether only the sizes of the operation's arguments matter.
inline bool is_random_like(const c10::FunctionSchema& schema) {
  static constexpr std::array<std::string_view, 3> kRandomLike = {
      "aten::rand_like", "aten::randn_like", "aten::randint_like"};
  return std::ranges::find(kRandomLike, schema.name()) != kRandomLike.end();
}

inline bool is_generator(const c10::Argument& argument) {
  return argument.name() == "generator";
}

inline bool is_written(const c10::Argument& argument) {
  // The schemas of batch_norm() and instance_norm() do not say that these are written.
  if (argument.name() == "running_mean" || argument.name() == "running_var") return true;
  const c10::AliasInfo* const alias = argument.alias_info();
  if (alias == nullptr) return false;
  return alias->isWrite() || std::ranges::any_of(alias->containedTypes(),
                                                 [](const auto& inner) { return inner.isWrite(); });
}

}  // namespace cadre
