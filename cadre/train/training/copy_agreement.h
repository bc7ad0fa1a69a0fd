// What the ranks of one copy of a model agree on in each step: the step, the options of the
// optimizer, the rows, and the parameters that each of them has whole.
//
// Threads: one. Blocking: every method is collective. Lifetime: keeps the groups and shares the
// parameters. Errors: kInvalidArgument on all ranks of the copy, before a parameter changes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/train/training/training_division.h"

namespace torch::optim {
class Optimizer;
}

namespace cadre::training_parts {

class CADRE_EXPORT CopyAgreement {
 public:
  // records: those of the divided layers. Does nothing in any method if each rank has a copy.
  CopyAgreement(const TrainingDivision& division, const std::vector<ParameterShard>& records);

  // Sets the names under which errors list the optimizer's parameters.
  void set_names(const std::vector<NamedTensor>& parameters);
  // Throws if ranks are in different steps, if their optimizers have different options, or if
  // parameters that should be equal differ. Compares parameters in the first steps, and later in
  // every 16th.
  void agree_on_step(const torch::optim::Optimizer& optimizer);
  // Throws unless every rank has a row for each microbatch of a pipeline.
  void agree_on_microbatches(int64_t num_rows, int64_t num_parts) const;

 private:
  void add_names_of(const torch::optim::Optimizer& optimizer);
  void compare_replicated() const;

  ProcessGroup world_;
  std::optional<ProcessGroup> copy_;
  std::optional<ProcessGroup> layers_;   // the ranks that divide the layers
  std::vector<NamedTensor> replicated_;  // the parameters that all of them have whole
  std::map<const c10::TensorImpl*, std::string> names_;
  int64_t num_steps_ = 0;
};

}  // namespace cadre::training_parts
