// What the parameter groups and the options of an optimizer say, without its type: digests and
// words with which ranks compare them, and which state the options need.
//
// Threads: any. Blocking: never. Lifetime: keeps nothing. Errors: those of GroupTerms.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cadre/base/export.h"
#include "cadre/group/agreement.h"

namespace torch::optim {
class OptimizerOptions;
class OptimizerParamGroup;
}  // namespace torch::optim

namespace cadre::optim_state {

// "lr 0.001, betas 0.9 and 0.999, eps 1e-08, weight decay 0.01, amsgrad false". For a type that is
// not torch::optim's: its name, and the learning rate where it has one.
CADRE_EXPORT std::string text_of(const torch::optim::OptimizerOptions& options);

// The tensors without which a state cannot go on under these options: "exp_avg". Empty for a type
// that is not torch::optim's.
CADRE_EXPORT std::vector<std::string> needed_state_of(
    const torch::optim::OptimizerOptions& options);

// How the parameters of groups, which are tensors, are known to all ranks.
struct GroupTerms {
  const std::vector<torch::optim::OptimizerParamGroup>& groups;
  const torch::optim::OptimizerOptions* defaults;  // for groups without any; null: all have some
  // Empty for a parameter that the ranks need not have in common; a group of such ones is none.
  std::function<std::string(const at::Tensor&)> name_of;
  // mark_of_state(); null where states are not compared.
  std::function<int64_t(const at::Tensor&)> state_mark_of = {};
};
// What the terms must have in common on all ranks.
CADRE_EXPORT void add_fields_of(const GroupTerms& terms, std::vector<AgreedField>& fields);
// Digest of what add_fields_of() adds.
CADRE_EXPORT uint64_t digest_of(const GroupTerms& terms);

}  // namespace cadre::optim_state
