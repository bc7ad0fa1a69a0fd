// Computes, from the sizes of a model's parameters, how much memory a rank needs and how many bytes
// a step transfers, for each strategy of data parallelism.
//
// Threads: any. Errors: kInvalidArgument for inconsistent options or sizes. Allocates no memory of
// the model's size.
//
// The formulas are those of the ZeRO paper (arXiv:1910.02054, sections 3 to 5). For P bytes of
// parameters, S of optimizer state, N ranks and one dtype:
//              parameters   gradients   state   a rank receives in a step
//   ddp        P            P           S       2 P (N-1)/N                   all_reduce
//   zero1      P            P           S/N     3 P (N-1)/N                   and all_gather
//   zero2      P            P/N         S/N     2 P (N-1)/N                   and reduce_scatter
//   fsdp       P/N          P/N         S/N     3 P (N-1)/N                   the same
//   hsdp: as fsdp along the shard axis, and an all_reduce of the gradient shards over the replicas.
//   With Reshard::kAfterBackward, fsdp gathers once in a step, so a rank receives 2 P (N-1)/N.
// (The paper's ZeRO-1 reduce_scatters the gradients, and so transfers 2 P. Cadre's stage 1 keeps
// whole gradients, for programs that read parameter.grad().) An all_reduce counts as a
// reduce_scatter and an all_gather, which is the least that a rank receives with any algorithm
// (Patarasuk and Yuan, 2009); ranks that share memory copy less.
//
// A plan uses the wrappers' own code for layouts and buffer sizes (parallel/shard/flat_layout.h,
// parallel/buckets/gradient_memory.h), and runs their schedule of units, but only counts the
// memory. So it includes padding, whole pages of shared memory, buckets, the buffers in which
// gradients are reduced, gathered units including the prefetched one, and whole gradients until
// their reduction. The sum is the peak of a rank during training, without activations and
// libraries. The construction may need more: the whole model, unless it is deferred. Rank 0 needs
// the most memory.
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
  int ranks_per_host = 1;  // the last host may have fewer ranks
  int rank = 0;            // the rank whose memory is computed
  // How many values for each element of a parameter the optimizer keeps, or allocates during an
  // update.
  struct Optimizer {
    // State tensors for each parameter, of the parameter's sizes and dtype: 2 for Adam and AdamW, 0
    // or 1 for SGD.
    int states = 2;
    // Temporary tensors of the parameter's sizes during an update: 0 for the fused kernels.
    int temporaries = 0;
  };
  Optimizer optimizer = {};
  // Whether the model is on a device that is not the CPU, one for each rank. The plan then counts
  // the memory of the device, as libtorch's allocator of the device counts what tensors use, and
  // nothing of the host.
  bool is_on_device = false;
  int64_t accumulate = 1;  // backwards for each step; the last one reduces gradients

  // The caps of gradient buckets, used by ddp, zero1 and zero2.
  BucketCaps bucket_caps = {};
  // ZeroOptions::bucket_cap_bytes, used by zero1.
  int64_t zero_bucket_cap_bytes = int64_t{16} << 20;

  // The following members are for fsdp and hsdp. Reshard::kOntoGroup is not supported.
  int num_replicas = 1;  // hsdp: the size of the first axis of the mesh
  // Whether the form of the shards is ShardForm::kMapped. Ignored if the ranks that own the shards
  // of one replica are on several hosts.
  bool is_mapped = false;
  Reshard reshard = Reshard::kAfterForward;
  Reshard reshard_root = Reshard::kAfterBackward;
  int num_prefetched = 1;
  std::optional<DType> parameter_dtype = {};  // ShardPrecision::parameters
  std::optional<DType> reduce_dtype = {};     // ShardPrecision::reduce
};

// The memory of one rank, or of its device, in bytes. Shared memory counts for the rank that
// allocates it, so the sum over the ranks of a host is the memory of the host.
struct HeldBytes {
  int64_t parameters = 0;  // whole parameters or shards
  int64_t gradients = 0;   // reduced gradients, whole or shards
  int64_t optimizer_state = 0;
  int64_t full_units = 0;         // gathered units at the peak, as the buffers of the pool
  int64_t reduction_buffers = 0;  // inputs and outputs of reductions
  // The larger of whole gradients before their reduction and temporaries of the optimizer.
  int64_t transient = 0;
  int64_t buffers = 0;  // the module's buffers

  int64_t total() const {
    return parameters + gradients + optimizer_state + full_units + reduction_buffers + transient +
           buffers;
  }
};

struct OperationTraffic {
  int64_t num_calls = 0;
  // The size of the whole tensor: the output of an all_gather, the input of a reduction.
  int64_t payload_bytes = 0;
  int64_t received_bytes = 0;  // what one rank receives
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

// Parameters whose values or gradients are communicated together: a bucket of gradients, a flat
// buffer of zero1, or a unit of fsdp.
struct PlannedPart {
  std::string name;          // such as "gradients 0", "parameters 0" or "unit blocks.3"
  int64_t numel = 0;         // elements without padding
  int64_t flat_bytes = 0;    // the whole buffer that is reduced or gathered
  int64_t shard_bytes = 0;   // this rank's shard of the parameters; 0 if they are whole
  StepTraffic traffic = {};  // its collectives in one optimizer step
};

struct MemoryPlan {
  PlanOptions options;
  // Whether shards are mapped and read in place, because all ranks that own the shards of one
  // replica are on one host.
  bool is_mapped = false;
  HeldBytes held;
  // How much of `held` is shared memory, which other ranks of the host read in collectives. A
  // cgroup charges it to the rank that allocates it. With one rank it is private memory.
  int64_t shared_bytes = 0;
  // The sum over the ranks of a host with ranks_per_host ranks, or over their devices.
  int64_t host_bytes = 0;
  StepTraffic traffic;  // all collectives in one optimizer step, also small ones
  std::vector<PlannedPart> parts;
};

CADRE_EXPORT MemoryPlan plan_memory(const ModelSizes& model, const PlanOptions& options);

}  // namespace cadre
