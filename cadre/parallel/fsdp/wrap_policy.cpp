#include "cadre/parallel/fsdp/wrap_policy.h"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"

namespace cadre {
namespace {

// Returns whether the pattern, in which `*` stands for any text without a dot, matches the name.
bool matches(std::string_view pattern, std::string_view name) {
  while (!pattern.empty() && pattern.front() != '*') {
    if (name.empty() || name.front() != pattern.front()) return false;
    pattern.remove_prefix(1);
    name.remove_prefix(1);
  }
  if (pattern.empty()) return name.empty();
  pattern.remove_prefix(1);
  while (!matches(pattern, name)) {
    if (name.empty() || name.front() == '.') return false;
    name.remove_prefix(1);
  }
  return true;
}

bool is_container(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) != nullptr;
}

// Returns whether the module is a layer, and none of the modules around it is one.
bool is_layer(const WrapCandidate& candidate) {
  bool is_in_container = false;
  for (const torch::nn::Module* const outer : candidate.around) {
    const bool is_outer_container = is_container(*outer);
    if (is_in_container && !is_outer_container) return false;
    is_in_container = is_outer_container;
  }
  return is_in_container && !is_container(candidate.module);
}

}  // namespace

WrapPolicy wrap_by_name(std::initializer_list<std::string> patterns, FullyShardOptions options) {
  std::vector<std::string> given(patterns);
  if (given.empty() || std::ranges::any_of(given, &std::string::empty)) {
    throw Error(ErrorCode::kInvalidArgument,
                "cadre::wrap_by_name(): a pattern is missing or empty; name modules of the model, "
                "such as \"layers.*\"");
  }
  return [given = std::move(given), options](const WrapCandidate& candidate) {
    const auto is_named = [&](const std::string& pattern) {
      return matches(pattern, candidate.name);
    };
    return unit_if(std::ranges::any_of(given, is_named), options);
  };
}

WrapPolicy wrap_layers(FullyShardOptions options) {
  return
      [options](const WrapCandidate& candidate) { return unit_if(is_layer(candidate), options); };
}

}  // namespace cadre
