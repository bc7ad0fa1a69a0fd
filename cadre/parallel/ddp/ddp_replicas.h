// The part of DistributedDataParallel that does not depend on the module's type: the core with the
// storage of gradients that the options choose.
//
// Threads: one. Blocking: make_ddp_replicas() is collective. Lifetime: shares the module's
// parameters and the group. Errors: cadre::Error.
#pragma once

#include <memory>
#include <vector>

#include "cadre/core/base/export.h"
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

struct DdpReplicas {
  std::shared_ptr<reduction::DataParallelCore> core;
  ProcessGroup group;
  std::vector<std::shared_ptr<FlatParameters>> flat_parameters;  // one for each bucket, if sharded
  std::vector<ParameterShard> shards;                            // by parameter, if sharded

  CADRE_EXPORT std::vector<ParameterShard> parameter_shards() const;
};

CADRE_EXPORT DdpReplicas make_ddp_replicas(const std::shared_ptr<torch::nn::Module>& module,
                                           const Ranks& ranks,
                                           const DistributedDataParallelOptions& options);

}  // namespace cadre::parallel
