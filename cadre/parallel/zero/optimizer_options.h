// What the options of an optimizer say, without its type: their values in words, so that ranks can
// compare them and an error can name them, and which state they need.
//
// Threads: any. Blocking: never. Lifetime: keeps nothing. Errors: those of name_of.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "cadre/base/export.h"
#include "cadre/group/agreement.h"

namespace torch::optim {
class OptimizerOptions;
class OptimizerParamGroup;
}  // namespace torch::optim

namespace cadre::parallel {

// "lr 0.001, betas 0.9 and 0.999, eps 1e-08, weight decay 0.01, amsgrad false". Of a type that is
// not torch::optim's: its name, and the learning rate where it has one.
CADRE_EXPORT std::string text_of(const torch::optim::OptimizerOptions& options);

// The tensors without which a state cannot go on under these options: "exp_avg". Empty for a type
// that is not torch::optim's.
CADRE_EXPORT std::vector<std::string> needed_state_of(
    const torch::optim::OptimizerOptions& options);

// What parameter groups and their options must have in common on all ranks. defaults: of groups
// without options; null where all have some.
CADRE_EXPORT void add_fields_of(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                const torch::optim::OptimizerOptions* defaults,
                                const std::function<std::string(const at::Tensor&)>& name_of,
                                std::vector<AgreedField>& fields);

}  // namespace cadre::parallel
