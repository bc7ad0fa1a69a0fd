// Computes from sizes alone what each rank holds of a model under each strategy, and what a step
// transfers.
//
// Threads: pure functions. Lifetime: values. Errors: kInvalidArgument with the inconsistent number.
// Allocates no memory of the model's size.
//
// The formulas are those of the ZeRO paper (arXiv:1910.02054, sections 3 to 5). For P bytes of
// parameters, S of optimizer state, N ranks and one dtype:
//              parameters   gradients   state   a rank receives in a step
//   ddp        P            P           S       2 P (N-1)/N                   all_reduce
//   zero1      P            P           S/N     3 P (N-1)/N                   and all_gather
//   zero2      P            P/N         S/N     2 P (N-1)/N                   and reduce_scatter
//   fsdp       P/N          P/N         S/N     3 P (N-1)/N                   the same
//   hsdp: fsdp along the shard axis, and an all_reduce of the shards over the replicas. fsdp with
//   Reshard::kAfterBackward gathers once in a step and receives 2 P (N-1)/N.
// (The paper's ZeRO-1 also reduces gradients to their owners, and so transfers 2 P. Cadre's stage 1
// keeps whole gradients, for code that reads parameter.grad().) An all_reduce counts as a
// reduce_scatter and an all_gather, which is the minimum that a rank receives in any algorithm
// (Patarasuk and Yuan, 2009); ranks that share memory copy less.
//
// A plan runs what the wrappers run: their layouts and buffer sizes (parallel/shard/flat_layout.h,
// parallel/buckets/gradient_memory.h) and the schedule of the units, with memory that is only
// counted. So it contains padding, whole pages of shared memory, buckets, the buffers in which
// gradients are reduced, gathered units including the prefetched one, and whole gradients between
// their computation and their reduction. The sum is the peak of a rank without activations and
// libraries, after construction, which needs the whole model once unless it is deferred. Rank 0
// holds the most.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/plan/model_sizes.h"
#include "cadre/parallel/shard/data_strategy.h"

namespace cadre {

// The settings of a training on which memory and traffic depend.
struct PlanOptions {
  DataStrategy strategy = DataStrategy::kDdp;
  int num_ranks = 1;
  int ranks_per_host = 1;  // the last host may have fewer
  int rank = 0;            // the rank whose memory is planned
  // The number of values that the optimizer keeps, or allocates during an update, for each element.
  struct Optimizer {
    // The number of states, stored in the parameter's dtype: 2 for Adam and AdamW, 0 or 1 for SGD.
    int states = 2;
    // The number of temporaries during an update, which is 0 for the fused kernels.
    int temporaries = 0;
  };
  Optimizer optimizer = {};
  int64_t accumulate = 1;  // the number of backwards per step; the last one reduces gradients

  // Only ddp, zero1 and zero2 use it.
  BucketCaps bucket_caps = {};
  // Only zero1 uses it, as ZeroOptions::bucket_cap_bytes.
  int64_t zero_bucket_cap_bytes = int64_t{16} << 20;

  // Only fsdp and hsdp use the following members; Reshard::kOntoGroup is not planned.
  int num_replicas = 1;  // for hsdp, the size of the first axis of the mesh
  // The form is ShardForm::kMapped. It is ignored if the ranks of a shard group are on several
  // hosts.
  bool is_mapped = false;
  Reshard reshard = Reshard::kAfterForward;
  Reshard reshard_root = Reshard::kAfterBackward;
  int num_prefetched = 1;
  std::optional<DType> parameter_dtype = {};  // the dtype of gathered floating-point parameters
  std::optional<DType> reduce_dtype = {};     // the dtype of gradients while they are reduced
};

// Bytes that one rank holds. Shared memory counts for its owner, so the sum over the ranks of a
// host is the memory of the host.
struct HeldBytes {
  int64_t parameters = 0;  // whole parameters, or shards
  int64_t gradients = 0;   // the gradients that are kept from their reduction to the step
  int64_t optimizer_state = 0;
  int64_t full_units = 0;  // full units at the peak; freed buffers are kept for the next unit
  int64_t reduction_buffers = 0;  // buffers in which gradients are reduced
  int64_t transient = 0;  // whole gradients before their reduction, or temporaries of the optimizer
  int64_t buffers = 0;    // the module's buffers

  int64_t total() const {
    return parameters + gradients + optimizer_state + full_units + reduction_buffers + transient +
           buffers;
  }
};

struct OperationTraffic {
  int64_t num_calls = 0;
  // The size of the whole tensor: the output of a gather, the input otherwise.
  int64_t payload_bytes = 0;
  int64_t received_bytes = 0;  // the number of bytes that one rank receives
  OperationTraffic& operator+=(const OperationTraffic& other) {
    num_calls += other.num_calls;
    payload_bytes += other.payload_bytes;
    received_bytes += other.received_bytes;
    return *this;
  }
  friend bool operator==(const OperationTraffic&, const OperationTraffic&) = default;
};

struct StepTraffic {
  OperationTraffic all_reduce;
  OperationTraffic reduce_scatter;
  OperationTraffic all_gather;

  int64_t received_bytes() const {
    return all_reduce.received_bytes + reduce_scatter.received_bytes + all_gather.received_bytes;
  }
  StepTraffic& operator+=(const StepTraffic& other) {
    all_reduce += other.all_reduce;
    reduce_scatter += other.reduce_scatter;
    all_gather += other.all_gather;
    return *this;
  }
};

// Parameters that are communicated together: a bucket of gradients, a buffer of zero1, or a unit.
struct PlannedPart {
  std::string name;          // for example "gradients 0", "parameters 0" or "unit blocks.3"
  int64_t numel = 0;         // the number of elements, padding excluded
  int64_t flat_bytes = 0;    // the size of the whole buffer that is reduced or gathered
  int64_t shard_bytes = 0;   // the size of this rank's part of the parameters; 0 if all are whole
  StepTraffic traffic = {};  // the traffic of one optimizer step
};

struct MemoryPlan {
  PlanOptions options;
  // The ranks of each shard group share memory, so that units are read in place.
  bool is_mapped = false;
  HeldBytes held;
  // The part of `held` that lies in the memory that the ranks of a host share; other ranks read it
  // in operations. A cgroup charges it to the rank that made it. In a group of one it is private
  // memory.
  int64_t shared_bytes = 0;
  int64_t host_bytes = 0;  // the sum over all ranks of a full host
  StepTraffic traffic;     // the traffic of one optimizer step, of the parts and the trailer
  std::vector<PlannedPart> parts;
};

CADRE_EXPORT MemoryPlan plan_memory(const ModelSizes& model, const PlanOptions& options);

}  // namespace cadre
