// Describes the parameter groups and options of an optimizer of any type as texts and hashes, so
// that the ranks can check that they are equal, and lists the state tensors that the options need.
//
// For a class of options that is not torch::optim's, the description is what its serialize() writes
// into an archive.
//
// Threads: any for the functions; one for an UncomparedOptions. Blocking: never. Lifetime: keeps
// nothing. Errors: those of GroupTerms.
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

// Returns "lr 0.001, betas 0.9 and 0.999, eps 1e-08, weight decay 0.01, amsgrad false". For a type
// that is not torch::optim's, returns its name and what its serialize() writes; without a
// serialize(), its name and its learning rate, if it has one.
CADRE_EXPORT std::string text_of(const torch::optim::OptimizerOptions& options);
// Returns whether text_of() contains all fields, as far as that can be determined. False for a
// class of the program without serialize(), or whose serialize() is that of its base class in
// torch::optim.
CADRE_EXPORT bool has_whole_text(const torch::optim::OptimizerOptions& options);

// Returns the names of the state tensors that an optimizer with these options needs to continue,
// such as "exp_avg". Empty for a type that is not torch::optim's.
CADRE_EXPORT std::vector<std::string> needed_state_of(
    const torch::optim::OptimizerOptions& options);

// Parameter groups that the ranks compare, and how the parameters are named on all ranks.
struct GroupTerms {
  const std::vector<torch::optim::OptimizerParamGroup>& groups;
  // Options of groups that have none of their own; null if every group has its own.
  const torch::optim::OptimizerOptions* defaults;
  // Returns the name of a parameter; empty for one that other ranks need not have. A group with
  // only such parameters is not compared.
  std::function<std::string(const at::Tensor&)> name_of;
  // Returns mark_of_state() of a parameter (state_tensors.h). An empty function means that the
  // states are not compared.
  std::function<int64_t(const at::Tensor&)> state_mark_of = {};
};
// Appends the names, options and states of the groups as fields that must be equal on all ranks.
CADRE_EXPORT void add_fields_of(const GroupTerms& terms, std::vector<AgreedField>& fields);
// Returns a hash of what add_fields_of() appends.
CADRE_EXPORT uint64_t digest_of(const GroupTerms& terms);

// Logs a warning, once for each class of options that may have fields which the ranks do not
// compare.
class CADRE_EXPORT UncomparedOptions {
 public:
  void warn(LogSink& log, std::string_view component, const GroupTerms& terms);

 private:
  std::set<std::type_index> known_;
};

}  // namespace cadre::optim_state
