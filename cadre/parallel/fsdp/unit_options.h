// The options of each unit: its own, or those of the wrapper; and whether the ranks have the same.
//
// Threads: pure functions, but for check_same_units(). Blocking: check_same_units() is collective,
// until the group's deadline. Lifetime: the results refer to the arguments.
// Errors: kInvalidArgument that begins with the wrapper's name.
#pragma once

#include <string>

#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/fsdp/reshard_groups.h"
#include "cadre/parallel/fsdp/unit_assignment.h"
#include "cadre/wrap/located_group.h"

namespace torch::nn {
class Module;
}

namespace cadre::parallel {

inline constexpr const char* kFullySharded = "FullyShardedDataParallel";

[[noreturn]] void refuse_model(const std::string& what);

const ShardPrecision& precision_of(const AssignedUnit& assigned,
                                   const FullyShardedDataParallelOptions& options);
// shard: the ranks that own shards of the unit.
ReshardChoice reshard_of(const AssignedUnit& assigned,
                         const FullyShardedDataParallelOptions& options,
                         const wrap::LocatedGroup& shard);

// Refuses a form of shards that does not go with the other options.
void check_form(const FullyShardedDataParallelOptions& options);
// Refuses a null module and numbers out of range.
void check_options(const torch::nn::Module* module, const FullyShardedDataParallelOptions& options);
// Refuses units and options that differ between the ranks of `group`, which would shard other sets
// of parameters, and gather each other's.
void check_same_units(const UnitAssignment& assignment,
                      const FullyShardedDataParallelOptions& options,
                      const wrap::LocatedGroup& shard, const wrap::LocatedGroup& group);

}  // namespace cadre::parallel
