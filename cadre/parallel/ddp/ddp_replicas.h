// Implements the part of DistributedDataParallel that does not depend on the module's type:
// constructs the DataParallelCore and the storage of gradients that the options choose.
//
// Threads: one. Blocking: make_ddp_replicas() is a collective. Lifetime: shares the module's
// parameters and the group. Errors: cadre::Error.
#pragma once

#include <exception>
#include <memory>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/buckets/comm_hook.h"
#include "cadre/parallel/ddp/options.h"
#include "cadre/parallel/reduction/data_parallel_core.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/mesh/ranks.h"

namespace torch::nn {
class Module;
}

namespace cadre::parallel {

template <typename Given>
inline constexpr bool kIsModulePointer = false;

// Stops the compilation with a readable message if the argument for the module has the wrong type
// `Given`.
template <typename Given>
struct RefusedModule {
  static_assert(kIsModulePointer<Given>,
                "cadre::DistributedDataParallel(module, ranks): pass a std::shared_ptr to a module "
                "(std::make_shared<Net>()) or a module holder (TORCH_MODULE, "
                "torch::nn::Sequential), then the group");
};

struct DdpReplicas {
  std::shared_ptr<reduction::DataParallelCore> core;
  ProcessGroup group;
  // Used only if gradients are sharded: flat_parameters has one element for each bucket, shards has
  // one for each parameter.
  std::vector<std::shared_ptr<shard::FlatParameters>> flat_parameters;
  std::vector<ParameterShard> shards;
  // What the communication hook keeps; null without a hook, and in a group of one rank. Belongs to
  // the core.
  CommHook::State* hook = nullptr;

  CADRE_EXPORT SavedCommHook saved_hook() const;
  CADRE_EXPORT void load_hook(const SavedCommHook& saved) const;
  CADRE_EXPORT std::vector<ParameterShard> parameter_shards() const;
};

CADRE_EXPORT DdpReplicas make_ddp_replicas(const std::shared_ptr<torch::nn::Module>& module,
                                           const Ranks& ranks,
                                           const DistributedDataParallelOptions& options);

// Takes the place of the DdpReplicas in the initializers of constructors that must not compile,
// because their argument `Given` is no module.
template <typename Given>
[[noreturn]] DdpReplicas refuse_module() {
  [[maybe_unused]] const RefusedModule<Given> refused;
  std::terminate();
}

}  // namespace cadre::parallel
