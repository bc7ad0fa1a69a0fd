// Makes replicas of a module whose backward adds their gradients to those of the module.
//
// Threads: one at a time; nothing may change the module meanwhile. Blocking: while parameters are
// copied. Lifetime: the graph of a replica's output keeps what its backward needs; a replica serves
// one forward or several, as long as the module does not change. Errors: kInvalidArgument with the
// name of the tensor.
// Source: torch.nn.parallel.replicate and its Broadcast and ReduceAddCoalesced.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace torch::nn {
class Module;
}

namespace cadre::data_parallel {

using ModulePointer = std::shared_ptr<torch::nn::Module>;

// Returns a replica for each device. The first is the module itself, which must be on the first
// device. Parameters of a replica on the module's device share the module's memory and version
// counters; those of another device are copies. A replica has copies of the buffers, so that what
// its forward writes to them (the statistics of BatchNorm) is lost, except for the first. `make`
// returns a module of the same structure, on any device and with any values, for example a clone.
// Random numbers that it draws from the default generator of the CPU are drawn again afterwards.
CADRE_EXPORT std::vector<ModulePointer> replicate(const ModulePointer& module,
                                                  std::span<const c10::Device> devices,
                                                  const std::function<ModulePointer()>& make);

// Lets the graph of these outputs keep the replicas: what a module saves for backward, such as an
// activation checkpoint, may refer to the module.
CADRE_EXPORT void keep_until_backward(std::span<const at::Tensor> outputs,
                                      std::vector<ModulePointer> replicas);

template <typename M>
using MakeReplica = std::function<std::shared_ptr<M>(const M& module)>;

// Does the same for a module type M. By default replicas are clones: M is derived from
// torch::nn::Cloneable<M>, or is a container of libtorch.
template <typename M>
std::vector<std::shared_ptr<M>> replicate(const std::shared_ptr<M>& module,
                                          std::span<const c10::Device> devices,
                                          const MakeReplica<M>& make = {}) {
  const auto found = replicate(ModulePointer(module), devices, [&]() -> ModulePointer {
    return make ? ModulePointer(make(*module)) : module->clone();
  });
  std::vector<std::shared_ptr<M>> replicas;
  for (const ModulePointer& replica : found) {
    replicas.push_back(std::dynamic_pointer_cast<M>(replica));
    if (replicas.back() == nullptr) {
      throw Error(ErrorCode::kInvalidArgument,
                  "data_parallel::replicate: clone() has returned a module of another type; derive "
                  "the module from torch::nn::Cloneable, or pass a function that makes a replica");
    }
  }
  return replicas;
}

}  // namespace cadre::data_parallel
