// The options of each unit, which are its own or those of the wrapper; checks of options and of a
// model; and the fields that the ranks compare.
//
// Threads: pure functions. Blocking: never. Lifetime: the results refer to the arguments.
// Errors: kInvalidArgument that begins with the wrapper's name.
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

// Returns the dtype of gathered parameters whose shards have this dtype.
at::ScalarType compute_dtype_of(at::ScalarType dtype, std::optional<at::ScalarType> parameters);
const ShardPrecision& precision_of(const AssignedUnit& assigned,
                                   const FullyShardedDataParallelOptions& options);
// `shard` consists of the ranks that own shards of the unit.
ReshardChoice reshard_of(const AssignedUnit& assigned,
                         const FullyShardedDataParallelOptions& options,
                         const wrap::LocatedGroup& shard);

// Throws for a null module, for numbers out of range, and for options that exclude each other.
void check_options(const torch::nn::Module* module, const FullyShardedDataParallelOptions& options);
// Throws for a model that cannot be sharded in these units. Changes nothing.
void check_model(const torch::nn::Module& module, const UnitAssignment& assignment,
                 const FullyShardedDataParallelOptions& options, const wrap::LocatedGroup& shard);
// Returns the fields that must be equal on all ranks; otherwise ranks would shard different sets of
// parameters, and gather wrong ones.
std::vector<AgreedField> fields_of(const UnitAssignment& assignment,
                                   const FullyShardedDataParallelOptions& options,
                                   const wrap::LocatedGroup& shard);

}  // namespace cadre::parallel
