// Determines the options of each unit, which are its own or else the wrapper's; checks the options
// and the model; and lists the settings that must be equal on all ranks.
//
// Lifetime: the results refer to the arguments. Errors: kInvalidArgument, with a text that begins
// with the wrapper's name.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/fsdp/reshard_groups.h"
#include "cadre/parallel/fsdp/unit_assignment.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/hooks/located_group.h"

namespace torch::nn {
class Module;
}

namespace cadre::parallel {

inline constexpr const char* kFullySharded = "FullyShardedDataParallel";

[[noreturn]] void refuse_model(const std::string& what);

// Returns the dtype that parameters get when they are gathered. dtype: the dtype of their shards.
// parameters: ShardPrecision::parameters.
at::ScalarType compute_dtype_of(at::ScalarType dtype, std::optional<at::ScalarType> parameters);
const ShardPrecision& precision_of(const AssignedUnit& assigned,
                                   const FullyShardedDataParallelOptions& options);
// shard: the ranks that own shards of the unit.
ReshardChoice reshard_of(const AssignedUnit& assigned,
                         const FullyShardedDataParallelOptions& options,
                         const wrap::LocatedGroup& shard);

// Throws if the module is null, if an option is out of range, or if options exclude each other.
void check_options(const torch::nn::Module* module, const FullyShardedDataParallelOptions& options);
// Throws if the model cannot be sharded with these units. Does not change the model.
void check_model(const torch::nn::Module& module, const UnitAssignment& assignment,
                 const FullyShardedDataParallelOptions& options, const wrap::LocatedGroup& shard);
// Returns the settings that must be equal on all ranks, with their names for errors. With different
// settings the ranks would gather different parameters in the same collective.
std::vector<AgreedField> fields_of(const UnitAssignment& assignment,
                                   const FullyShardedDataParallelOptions& options,
                                   const wrap::LocatedGroup& shard);

}  // namespace cadre::parallel
