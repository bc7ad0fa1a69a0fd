// What the parameter groups and the options of an optimizer say, without its type: digests and
// words with which ranks compare them, and which state the options need.
//
// A class of options that is not torch::optim's is known by what it writes into an archive: its
// serialize(), as torch::optim's own classes have it.
//
// Threads: any; an UncomparedOptions: one. Blocking: never. Lifetime: keeps nothing. Errors: those
// of GroupTerms.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <typeindex>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/log.h"

namespace torch::optim {
class OptimizerOptions;
class OptimizerParamGroup;
}  // namespace torch::optim

namespace cadre {
struct AgreedField;
}

namespace cadre::optim_state {

// "lr 0.001, betas 0.9 and 0.999, eps 1e-08, weight decay 0.01, amsgrad false". Of a type that is
// not torch::optim's: its name and what its serialize() writes, or, without one, its name and the
// learning rate where it has one.
CADRE_EXPORT std::string text_of(const torch::optim::OptimizerOptions& options);
// Whether text_of() has all fields, as far as that can be known: false for a class of the program
// without a serialize(), or with that of the class of torch::optim from which it is derived.
CADRE_EXPORT bool has_whole_text(const torch::optim::OptimizerOptions& options);

// The tensors without which a state cannot go on under these options: "exp_avg". Empty for a type
// that is not torch::optim's.
CADRE_EXPORT std::vector<std::string> needed_state_of(
    const torch::optim::OptimizerOptions& options);

// How the parameters of groups, which are tensors, are known to all ranks.
struct GroupTerms {
  const std::vector<torch::optim::OptimizerParamGroup>& groups;
  const torch::optim::OptimizerOptions* defaults;  // of groups without options; null: all have some
  // Empty for a parameter that the ranks need not have in common; a group of such ones is none.
  std::function<std::string(const at::Tensor&)> name_of;
  // mark_of_state(); null where states are not compared.
  std::function<int64_t(const at::Tensor&)> state_mark_of = {};
};
// What the terms must have in common on all ranks.
CADRE_EXPORT void add_fields_of(const GroupTerms& terms, std::vector<AgreedField>& fields);
// A digest of what add_fields_of() lists.
CADRE_EXPORT uint64_t digest_of(const GroupTerms& terms);

// Warns of options of which the ranks do not compare all fields, once for each class.
class CADRE_EXPORT UncomparedOptions {
 public:
  void warn(LogSink& log, std::string_view component, const GroupTerms& terms);

 private:
  std::set<std::type_index> known_;
};

}  // namespace cadre::optim_state
