// Parameters of several stages that are one parameter of the model, such as an embedding in the
// first stage and the head in the last one: equal at the start, and with one gradient, the sum of
// what the stages computed.
//
// Threads: one. Blocking: all methods are collective among the ranks that hold the parameter, until
// the group's deadline. Lifetime: shares the tensors; keeps the group. Errors: as ProcessGroup.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "cadre/group/process_group.h"

namespace cadre::parallel {

// A parameter by its stage and its name in the stage's module.
struct StageParameter {
  int stage;
  std::string name;
};

class TiedParameters {
 public:
  struct Holders {
    std::vector<int> ranks;            // ascending, each once
    int root = 0;                      // of which the values count; one of them
    std::vector<at::Tensor> own = {};  // of this rank, the root's first one first
  };
  TiedParameters(ProcessGroup group, Holders holders);

  // The root's values everywhere.
  void broadcast() const;
  // In the order of ranks, so that all holders have the same bits.
  void sum_gradients() const;
  // Whether the values of this rank are the root's.
  bool are_equal() const;

 private:
  bool is_holder() const;
  // The root's tensor on every holder: `tensor` itself on the root, which sends it to the others.
  at::Tensor from_root(const at::Tensor& tensor) const;

  ProcessGroup group_;
  Holders holders_;
};

}  // namespace cadre::parallel
