// The state that an optimizer keeps for a whole parameter, whatever part of it each rank keeps.
//
// Threads: plain values. Blocking: never. Lifetime: shares the tensors. Errors: none.
// Names are those of torch.optim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace cadre {

struct FullParameterState {
  std::string name;                           // name of the parameter
  std::optional<int64_t> step = {};           // nullopt for SGD
  std::map<std::string, at::Tensor> tensors;  // by name ("exp_avg"), each of the parameter's sizes
};

}  // namespace cadre
