#include "cadre/parallel/plan/plan_options.h"

#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {

namespace {

bool is_floating_point(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBfloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

void require_option(bool holds, const std::string& problem) {
  if (!holds) throw Error(ErrorCode::kInvalidArgument, format("plan_memory: {}", problem));
}

void check_sharding(const PlanOptions& options) {
  const bool is_by_units = has_units(options.strategy);
  const std::string_view strategy = to_string(options.strategy);
  require_option(
      is_by_units || !options.is_mapped,
      format("is_mapped applies to fsdp and hsdp, but the strategy is {}; leave it out", strategy));
  require_option(
      is_by_units || (!options.parameter_dtype && !options.reduce_dtype),
      format("parameter_dtype and reduce_dtype are for fsdp and hsdp, the strategy is {}; give "
             "the parameters themselves the dtype",
             strategy));
  require_option(options.strategy == DataStrategy::kHsdp || options.num_replicas == 1,
                 format("num_replicas is {}, which is for hsdp, the strategy is {}; leave it 1",
                        options.num_replicas, strategy));
  require_option(options.num_replicas >= 1 && options.num_ranks % options.num_replicas == 0,
                 format("num_replicas is {}, which does not divide the {} ranks",
                        options.num_replicas, options.num_ranks));
  require_option(
      options.reshard != Reshard::kOntoGroup && options.reshard_root != Reshard::kOntoGroup,
      "reshard is kOntoGroup, which cannot be planned; plan kAfterForward, which holds less and "
      "moves as "
      "much, and kAfterBackward, which holds more");
  require_option(options.alignment >= 1,
                 format("alignment is {}; it must be at least 1", options.alignment));
  require_option(options.num_prefetched == 0 || options.num_prefetched == 1,
                 format("num_prefetched is {}; choose 0 or 1", options.num_prefetched));
  require_option(!options.parameter_dtype || is_floating_point(*options.parameter_dtype),
                 "parameter_dtype is not a floating-point dtype");
  require_option(!options.reduce_dtype || is_floating_point(*options.reduce_dtype),
                 "reduce_dtype is not a floating-point dtype");
}

}  // namespace

void check_plan_options(const PlanOptions& options) {
  require_option(options.num_ranks >= 1 && options.ranks_per_host >= 1,
                 format("{} ranks, {} on each host; both must be at least 1", options.num_ranks,
                        options.ranks_per_host));
  require_option(options.rank >= 0 && options.rank < options.num_ranks,
                 format("rank {} of {}", options.rank, options.num_ranks));
  require_option(
      options.strategy != DataStrategy::kSingle || options.num_ranks == 1,
      format("the strategy single is for one rank, and there are {}", options.num_ranks));
  require_option(options.accumulate >= 1,
                 format("accumulate is {}; it must be at least 1", options.accumulate));
  require_option(options.optimizer.states >= 0 && options.optimizer.temporaries >= 0,
                 "the optimizer has a negative number of states");
  check_sharding(options);
}

}  // namespace cadre
