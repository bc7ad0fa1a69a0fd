// The settings of a training on which memory and traffic depend.
//
// Threads: plain values. Blocking: never. Errors: check_plan_options() throws kInvalidArgument with
// the invalid number.
#pragma once

#include <cstdint>
#include <optional>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/plan/model_sizes.h"
#include "cadre/parallel/shard/data_strategy.h"

namespace cadre {

struct PlanOptions {
  DataStrategy strategy = DataStrategy::kDdp;
  int num_ranks = 1;
  int ranks_per_host = 1;  // the last host may have fewer
  int rank = 0;            // the rank whose memory is planned
  OptimizerSizes optimizer = {};
  int64_t accumulate = 1;  // backwards for each step; gradients are reduced in the last

  // ddp, zero1 and zero2.
  BucketCaps bucket_caps = {};
  // zero1: ZeroOptions::bucket_cap_bytes.
  int64_t zero_bucket_cap_bytes = int64_t{16} << 20;

  // zero1, zero2, fsdp and hsdp: FlatParametersOptions::alignment, in elements.
  int64_t alignment = 32;

  // fsdp and hsdp; Reshard::kOntoGroup is not planned.
  int num_replicas = 1;  // hsdp: of the first axis of the mesh
  // ShardForm::kMapped; ignored if the ranks of a shard group are on several hosts.
  bool is_mapped = false;
  Reshard reshard = Reshard::kAfterForward;
  Reshard reshard_root = Reshard::kAfterBackward;
  int num_prefetched = 1;
  std::optional<DType> parameter_dtype = {};  // gathered floating-point parameters
  std::optional<DType> reduce_dtype = {};     // gradients while they are reduced
};

CADRE_EXPORT void check_plan_options(const PlanOptions& options);

}  // namespace cadre
