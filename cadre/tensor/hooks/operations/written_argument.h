// Says which arguments an operation of libtorch writes to.
//
// Threads: any.
#pragma once

#include <ATen/core/alias_info.h>
#include <ATen/core/function_schema.h>

#include <algorithm>

namespace cadre::wrap {

// Returns whether an operation writes to this argument, or to tensors of it if it is a list.
inline bool is_written(const c10::Argument& argument) {
  // batch_norm() and instance_norm() write these arguments, although their schemas do not say so.
  if (argument.name() == "running_mean" || argument.name() == "running_var") return true;
  const c10::AliasInfo* const alias = argument.alias_info();
  if (alias == nullptr) return false;
  return alias->isWrite() || std::ranges::any_of(alias->containedTypes(),
                                                 [](const auto& inner) { return inner.isWrite(); });
}

}  // namespace cadre::wrap
