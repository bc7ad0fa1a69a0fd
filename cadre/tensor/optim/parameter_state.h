// The optimizer state of one parameter: the type that state_dict() returns and load_state_dict()
// takes for any optimizer, and that a snapshot (checkpoint) contains.
//
// Threads: plain values. Lifetime: shares the tensors.
// Names are those of torch.optim: step, exp_avg, exp_avg_sq, max_exp_avg_sq, momentum_buffer,
// square_avg, grad_avg, sum, acc_delta.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

struct ParameterState {
  // The name of the parameter in the plain module, without a wrapper.
  std::string parameter;
  // The tensors have the sizes of the parameter in ZeroRedundancyOptimizer's state_dict(), and the
  // sizes of this rank's shard (ParameterShard::values) in the state for a snapshot.
  std::vector<NamedTensor> tensors = {};
  // 0-dim tensors that are equal on all ranks, such as "step" of int64.
  std::vector<NamedTensor> scalars = {};
  // The index among this rank's ParameterShards with the same name. It is 0 unless the rank has
  // several tensors of one tied weight.
  size_t entry = 0;
};

}  // namespace cadre
