#include "cadre/parallel/fsdp/unit_options.h"

#include <ATen/ops/empty.h>

#include <string>

#include "cadre/base/error.h"
#include "cadre/base/fnv1a.h"
#include "cadre/base/format.h"

namespace cadre::parallel {
void refuse_model(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, format("{}: {}", kFullySharded, what));
}

const ShardPrecision& precision_of(const AssignedUnit& assigned,
                                   const FullyShardedDataParallelOptions& options) {
  if (assigned.unit == nullptr || !assigned.unit->binding().options.precision) {
    return options.precision;
  }
  return *assigned.unit->binding().options.precision;
}

ReshardChoice reshard_of(const AssignedUnit& assigned,
                         const FullyShardedDataParallelOptions& options,
                         const wrap::LocatedGroup& shard) {
  const std::optional<int> size = options.reshard_group_size;
  if (assigned.unit == nullptr) {
    return checked_choice("options.reshard_root", options.reshard_root, size, shard);
  }
  const FullyShardOptions& own = assigned.unit->binding().options;
  return checked_choice(format("the reshard of unit \"{}\"", assigned.name),
                        own.reshard.value_or(options.reshard),
                        own.reshard_group_size ? own.reshard_group_size : size, shard);
}

// Otherwise ranks would shard other sets of parameters, and gather each other's.
void check_same_units(const UnitAssignment& assignment,
                      const FullyShardedDataParallelOptions& options,
                      const wrap::LocatedGroup& shard, const wrap::LocatedGroup& group) {
  Fnv1a digest;
  for (const AssignedUnit& unit : assignment.units) {
    const ShardPrecision& precision = precision_of(unit, options);
    const ReshardChoice choice = reshard_of(unit, options, shard);
    digest.add(format("{}:{}:{}:{}:{};", unit.name, unit.parameters.size(),
                      static_cast<int>(choice.reshard), choice.group_size,
                      precision.parameters ? static_cast<int>(*precision.parameters) : -1));
  }
  digest.add(format("{}:{}:{}:{}:{}", options.num_prefetched, static_cast<int>(options.weighting),
                    static_cast<int>(options.form), options.offload.has_value(),
                    options.precision.reduce ? static_cast<int>(*options.precision.reduce) : -1));
  const at::Tensor own = at::empty({1}, at::kLong);
  own.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(digest.value());
  const at::Tensor all = at::empty({group.world_size()}, at::kLong);
  group.all_gather(all, own);
  const int64_t* digests = all.const_data_ptr<int64_t>();
  for (int rank = 1; rank < group.world_size(); ++rank) {
    if (digests[rank] == digests[0]) continue;
    refuse_model(
        format("rank {} has other units or options than rank 0 (this is rank {}, with {} units "
               "beside the root). Call fully_shard() for the same modules, and give it and the "
               "wrapper the same options, on all ranks",
               rank, group.rank(), assignment.units.size() - 1));
  }
}

void check_form(const FullyShardedDataParallelOptions& options) {
  if (!options.offload || options.form != ShardForm::kMapped) return;
  refuse_model(
      "options.form is kMapped, and options.offload keeps shards in files, which other ranks "
      "cannot read in place: choose ShardForm::kGathered, or leave offload out");
}

void check_options(const torch::nn::Module* module,
                   const FullyShardedDataParallelOptions& options) {
  if (module == nullptr) {
    refuse_model("the module is null; make it first, for example with std::make_shared<Net>()");
  }
  if (options.num_prefetched >= 0 && options.num_prefetched <= 1) return;
  refuse_model(
      format("options.num_prefetched is {}; choose 0 or 1: more units ahead cost memory and hide "
             "nothing that one does not",
             options.num_prefetched));
}

}  // namespace cadre::parallel
