#include "cadre/parallel/fsdp/wrap_policy.h"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {
namespace {

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

WrapPolicy wrap_by_name(std::vector<std::string> patterns, FullyShardOptions options) {
  if (patterns.empty() || std::ranges::any_of(patterns, &std::string::empty)) {
    throw Error(ErrorCode::kInvalidArgument,
                "cadre::wrap_by_name(): a pattern is missing or empty; name modules of the model, "
                "such as \"layers.*\"");
  }
  return [patterns = std::move(patterns), options](const WrapCandidate& candidate) {
    const auto is_named = [&](const std::string& pattern) {
      return wrap::matches_pattern(pattern, candidate.name);
    };
    return unit_if(std::ranges::any_of(patterns, is_named), options);
  };
}

WrapPolicy wrap_layers(FullyShardOptions options) {
  return
      [options](const WrapCandidate& candidate) { return unit_if(is_layer(candidate), options); };
}

}  // namespace cadre
