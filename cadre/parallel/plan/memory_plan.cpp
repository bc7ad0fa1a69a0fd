#include "cadre/parallel/plan/memory_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <span>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/parallel/plan/unit_residency.h"
#include "cadre/parallel/reduction/agreement/trailer.h"
#include "cadre/parallel/shard/flat_layout.h"
#include "cadre/tensor/hooks/sample_weight.h"

namespace cadre {

namespace {

constexpr int64_t kPageBytes = 4096;
constexpr size_t kNumReductionBuffers = 2;  // ShardedGradients' buffers for each dtype

int64_t bytes_of(int64_t numel, DType dtype) {
  return numel * static_cast<int64_t>(size_of(dtype));
}

int64_t divided_up(int64_t number, int64_t divisor) {
  return (number + divisor - 1) / divisor;
}

int64_t in_pages(int64_t num_bytes) {
  return divided_up(num_bytes, kPageBytes) * kPageBytes;
}

bool is_floating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBfloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

OperationTraffic moved(int64_t payload_bytes, int num_ranks, int64_t num_calls, int64_t passes) {
  // Each rank has one of N equal parts of the payload.
  return {.num_calls = num_calls,
          .payload_bytes = num_calls * payload_bytes,
          .received_bytes = num_ranks == 1 ? 0
                                           : num_calls * passes * (num_ranks - 1) *
                                                 divided_up(payload_bytes, num_ranks)};
}

OperationTraffic gathered(int64_t payload_bytes, int num_ranks, int64_t num_calls = 1) {
  return moved(payload_bytes, num_ranks, num_calls, /*passes=*/1);
}

OperationTraffic all_reduced(int64_t payload_bytes, int num_ranks) {
  return moved(payload_bytes, num_ranks, /*num_calls=*/1, /*passes=*/2);
}

void require_sizes(bool holds, const std::string& problem) {
  if (!holds) throw Error(ErrorCode::kInvalidArgument, format("plan_memory: {}", problem));
}

void check_model(const ModelSizes& model) {
  require_sizes(!model.units.empty(), "the model has no units; the first is the root");
  for (size_t unit = 1; unit < model.units.size(); ++unit) {
    require_sizes(model.units[unit].parent < unit,
                  format("unit {} has the parent {}; a parent comes before the units in it", unit,
                         model.units[unit].parent));
  }
  for (const PlannedParameter& parameter : model.parameters) {
    require_sizes(
        parameter.unit < model.units.size(),
        format("\"{}\" is in unit {}, but the model has {} units, numbered from 0, the root",
               parameter.name, parameter.unit, model.units.size()));
    require_sizes(std::ranges::all_of(parameter.sizes, [](int64_t size) { return size >= 0; }),
                  format("\"{}\" has a negative size", parameter.name));
  }
}

using Members = std::vector<const PlannedParameter*>;

std::vector<int64_t> numels_of(const Members& members) {
  std::vector<int64_t> numels;
  for (const PlannedParameter* member : members) numels.push_back(member->numel());
  return numels;
}

int64_t numel_of(const Members& members) {
  const std::vector<int64_t> numels = numels_of(members);
  return std::accumulate(numels.begin(), numels.end(), int64_t{0});
}

class Planner {
 public:
  Planner(const ModelSizes& model, const PlanOptions& options) : model_(model) {
    plan_.options = options;
    for (const PlannedParameter& parameter : model.parameters) {
      if (parameter.is_trained) trained_.push_back(&parameter);
    }
  }

  MemoryPlan run() {
    plan_.held.buffers = model_.buffer_bytes;
    switch (options().strategy) {
      case DataStrategy::kSingle:
      case DataStrategy::kDdp:
        plan_replicated();
        break;
      case DataStrategy::kZero1:
        plan_zero1();
        break;
      case DataStrategy::kZero2:
        plan_zero2();
        break;
      case DataStrategy::kFsdp:
      case DataStrategy::kHsdp:
        plan_units();
        break;
    }
    for (const PlannedPart& part : plan_.parts) plan_.traffic += part.traffic;
    add_agreements();
    plan_.host_bytes = plan_.held.total() * std::min(options().ranks_per_host, options().num_ranks);
    return std::move(plan_);
  }

 private:
  const PlanOptions& options() const { return plan_.options; }

  // The messages in which ranks compare numbers in each step, in addition to the trailer of the
  // gradients.
  void add_agreements() {
    constexpr int64_t kWordBytes = sizeof(int64_t);
    if (options().strategy == DataStrategy::kSingle || trained_.empty()) return;
    plan_.traffic.all_reduce += all_reduced(kSampleMessageBytes, num_ranks());
    // The bounds of two digests and a refusal, see ZeroCore::begin_step().
    if (options().strategy == DataStrategy::kZero1 || options().strategy == DataStrategy::kZero2) {
      plan_.traffic.all_reduce += all_reduced(5 * kWordBytes, num_ranks());
    }
    // The start of an update, see ShardFence.
    const int num_shards = num_ranks() / options().num_replicas;
    if (plan_.is_mapped) plan_.traffic.all_reduce += all_reduced(kWordBytes, num_shards);
    // With accumulation a backward is followed by a forward or by the update, so units are compared
    // at each change, see UnitSchedule.
    if (has_units(options().strategy) && options().accumulate > 1) {
      plan_.traffic.all_gather += gathered(kWordBytes * num_ranks(), num_ranks(), 2);
    }
  }

  // One buffer of ProcessGroup::empty_symmetric(): whole pages, after the pages of its signals.
  int64_t symmetric_bytes(int64_t num_bytes, int group_size) {
    constexpr auto kSignalBytes =
        static_cast<int64_t>(SymmetricBuffer::kNumSignals * sizeof(uint32_t));
    if (num_bytes == 0) return 0;
    const int64_t held = in_pages(num_bytes) + in_pages(group_size * kSignalBytes);
    plan_.shared_bytes += held;
    return held;
  }

  int num_ranks() const { return options().num_ranks; }

  void plan_replicated() {
    for (const PlannedParameter& parameter : model_.parameters) {
      plan_.held.parameters += bytes_of(parameter.numel(), parameter.dtype);
    }
    add_replicated_gradients();
    for (const PlannedParameter* parameter : trained_) add_state(*parameter, parameter->numel());
    finish_transient();
  }

  // Stage 1 copies the trained parameters to flat buffers that are whole on every rank.
  void plan_zero1() {
    for (const PlannedParameter& parameter : model_.parameters) {
      if (!parameter.is_trained) {
        plan_.held.parameters += bytes_of(parameter.numel(), parameter.dtype);
      }
    }
    add_replicated_gradients();
    const std::vector<Members> buffers = zero_buffers();
    for (size_t i = 0; i < buffers.size(); ++i) {
      add_whole_buffer(format("parameters {}", i), buffers[i], /*has_sharded_gradients=*/false);
    }
    finish_transient();
  }

  // As ZeroCore: in the order of the parameters, a buffer is closed before it exceeds the cap.
  std::vector<Members> zero_buffers() const {
    struct Open {
      Members members;
      int64_t num_bytes = 0;
    };
    std::map<DType, Open> open;
    std::vector<Members> closed;
    for (const PlannedParameter* parameter : trained_) {
      Open& current = open[parameter->dtype];
      const int64_t num_bytes = bytes_of(parameter->numel(), parameter->dtype);
      if (current.num_bytes + num_bytes > options().zero_bucket_cap_bytes &&
          !current.members.empty()) {
        closed.push_back(std::exchange(current, {}).members);
      }
      current.members.push_back(parameter);
      current.num_bytes += num_bytes;
    }
    for (auto& [dtype, rest] : open) {
      if (!rest.members.empty()) closed.push_back(std::move(rest.members));
    }
    return closed;
  }

  void plan_zero2() {
    for (const PlannedParameter& parameter : model_.parameters) {
      if (!parameter.is_trained) {
        plan_.held.parameters += bytes_of(parameter.numel(), parameter.dtype);
      }
    }
    int64_t largest_bucket_bytes = 0;
    const BucketLayout layout = bucket_layout();
    for (size_t i = 0; i < layout.buckets.size(); ++i) {
      const Members members = members_of(layout.buckets[i]);
      largest_bucket_bytes =
          std::max(largest_bucket_bytes, bytes_of(numel_of(members), members[0]->dtype));
      add_whole_buffer(format("bucket {}", i), members, /*has_sharded_gradients=*/true);
    }
    finish_sharded_gradients(num_ranks());
    add_gradients_on_their_way(largest_bucket_bytes);
  }

  // FlatParameters with keep_full: the buffer is always allocated, and the shard is a part of it.
  void add_whole_buffer(std::string name, const Members& members, bool has_sharded_gradients) {
    const FlatLayout layout(numels_of(members), num_ranks(),
                            {.of_shards = options().alignment, .of_tensors = options().alignment});
    const DType dtype = members[0]->dtype;
    PlannedPart part{.name = std::move(name),
                     .numel = numel_of(members),
                     .flat_bytes = bytes_of(layout.numel(), dtype),
                     .shard_bytes = bytes_of(layout.shard_numel(), dtype)};
    part.traffic.all_gather = gathered(part.flat_bytes, num_ranks());
    plan_.held.parameters += symmetric_bytes(part.flat_bytes, num_ranks());
    for (size_t i = 0; i < members.size(); ++i) {
      add_state(*members[i], layout.range(i, options().rank).size());
    }
    if (has_sharded_gradients) {
      add_sharded_gradients(part, layout, {.shard = dtype, .computed = dtype});
    }
    plan_.parts.push_back(std::move(part));
  }

  BucketLayout bucket_layout() const {
    std::vector<ParameterSize> sizes;
    for (const PlannedParameter* parameter : trained_) {
      sizes.push_back({.dtype = parameter->dtype, .numel = parameter->numel()});
    }
    return plan_bucket_layout(sizes, reverse_order(sizes.size()), options().bucket_caps);
  }

  Members members_of(const BucketLayout::Bucket& bucket) const {
    Members members;
    for (const int64_t index : bucket.parameters) members.push_back(trained_[index]);
    return members;
  }

  int64_t trained_bytes() const {
    int64_t total = 0;
    for (const PlannedParameter* parameter : trained_) {
      total += bytes_of(parameter->numel(), computed_dtype(parameter->dtype));
    }
    return total;
  }

  int64_t largest_gradient_bytes() const {
    int64_t largest = 0;
    for (const PlannedParameter* parameter : trained_) {
      largest = std::max(largest, bytes_of(parameter->numel(), computed_dtype(parameter->dtype)));
    }
    return largest;
  }

  // In a group of one DistributedDataParallel only calls the module, and autograd allocates the
  // gradients.
  void add_replicated_gradients() {
    if (num_ranks() == 1) {
      plan_.held.gradients = trained_bytes();
      if (options().accumulate > 1) plan_.held.transient = largest_gradient_bytes();
      return;
    }
    const BucketLayout layout = bucket_layout();
    for (size_t i = 0; i < layout.buckets.size(); ++i) {
      const Members members = members_of(layout.buckets[i]);
      const int64_t numel = numel_of(members);
      const bool is_last = i + 1 == layout.buckets.size();
      PlannedPart part{.name = format("gradients {}", i), .numel = numel};
      part.flat_bytes =
          bytes_of(numel + (is_last ? reduction::kTrailerNumel : 0), layout.buckets[i].dtype);
      part.traffic.all_reduce = all_reduced(part.flat_bytes, num_ranks());
      plan_.held.gradients += symmetric_bytes(part.flat_bytes, num_ranks());
      plan_.parts.push_back(std::move(part));
    }
    // A gradient is copied to its bucket when it is complete, and then freed.
    add_gradients_on_their_way(0);
    plan_.held.transient = std::max(plan_.held.transient, largest_gradient_bytes());
  }

  // Backwards without reduction accumulate whole gradients outside of the buffers.
  void add_gradients_on_their_way(int64_t num_bytes) {
    if (options().accumulate > 1) num_bytes = trained_bytes() + largest_gradient_bytes();
    plan_.held.transient = std::max(plan_.held.transient, num_bytes);
    finish_transient();
  }

  void add_state(const PlannedParameter& parameter, int64_t numel) {
    const int64_t value_bytes = bytes_of(numel, parameter.dtype);
    plan_.held.optimizer_state += options().optimizer.states * value_bytes;
    largest_update_bytes_ = std::max(largest_update_bytes_, value_bytes);
  }

  // The optimizer runs when all gradients are reduced.
  void finish_transient() {
    plan_.held.transient =
        std::max(plan_.held.transient, options().optimizer.temporaries * largest_update_bytes_);
  }

  DType computed_dtype(DType dtype) const {
    return is_floating(dtype) ? options().parameter_dtype.value_or(dtype) : dtype;
  }

  struct GradientDtypes {
    DType shard;
    DType computed;
  };

  // What ShardedGradients allocates for one FlatParameters with trained parameters.
  void add_sharded_gradients(PlannedPart& part, const FlatLayout& layout,
                             const GradientDtypes& dtypes) {
    const int num_shards = layout.num_shards();
    const int num_replicas = options().num_replicas;
    const DType reduced = options().reduce_dtype.value_or(dtypes.computed);
    const int64_t shard_bytes = bytes_of(layout.shard_numel(), dtypes.shard);
    const int64_t reduced_shard_bytes = bytes_of(layout.shard_numel(), reduced);
    plan_.held.gradients +=
        has_replicate_axis() ? symmetric_bytes(shard_bytes, num_replicas) : shard_bytes;
    ReductionNeed& need = needs_[reduced];
    need.flat_bytes = std::max(need.flat_bytes, bytes_of(layout.numel(), reduced));
    ++need.num_buckets;
    // If the reduction has another dtype than the shard, its output is a separate buffer.
    if (reduced != dtypes.shard) need.output_bytes.push_back(reduced_shard_bytes);
    part.traffic.reduce_scatter = gathered(bytes_of(layout.numel(), reduced), num_shards);
    if (has_replicate_axis()) {
      part.traffic.all_reduce = all_reduced(reduced_shard_bytes, num_replicas);
    }
  }

  bool has_replicate_axis() const { return options().strategy == DataStrategy::kHsdp; }

  void finish_sharded_gradients(int num_shards) {
    constexpr int64_t kTrailerBytes = reduction::kTrailerNumel * sizeof(float);
    int64_t& held = plan_.held.reduction_buffers;
    for (auto& [dtype, need] : needs_) {
      for (size_t i = 0; i < std::min(kNumReductionBuffers, need.num_buckets); ++i) {
        held += symmetric_bytes(need.flat_bytes, num_shards);
      }
      // With replicas all outputs are kept to the end of the pass; otherwise those of both buffers.
      std::ranges::sort(need.output_bytes, std::greater());
      const size_t num_outputs = has_replicate_axis()
                                     ? need.output_bytes.size()
                                     : std::min(kNumReductionBuffers, need.output_bytes.size());
      for (size_t i = 0; i < num_outputs; ++i) held += need.output_bytes[i];
    }
    if (needs_.empty()) return;
    held += symmetric_bytes(kTrailerBytes, num_ranks());
    plan_.traffic.all_reduce += all_reduced(kTrailerBytes, num_ranks());
  }

  void plan_units() {
    const int num_shards = num_ranks() / options().num_replicas;
    // Shards are along the last axis of the mesh, so a shard group has consecutive ranks.
    plan_.is_mapped = options().is_mapped && (num_ranks() <= options().ranks_per_host ||
                                              options().ranks_per_host % num_shards == 0);
    std::vector<ResidentUnit> resident;
    int64_t largest_gradients = 0;
    int64_t root_gradients = 0;
    for (size_t unit = 0; unit < model_.units.size(); ++unit) {
      const UnitBytes bytes = add_unit(unit, num_shards);
      (unit == 0 ? root_gradients : largest_gradients) =
          unit == 0 ? bytes.gradients : std::max(largest_gradients, bytes.gradients);
      resident.push_back({.parent = model_.units[unit].parent,
                          .full_bytes = bytes.full,
                          .reshard = unit == 0 ? options().reshard_root : options().reshard,
                          .has_trained = bytes.gradients > 0});
    }
    const Residency residency = residency_of(
        resident, {.num_prefetched = options().num_prefetched, .accumulate = options().accumulate});
    plan_.held.full_units = residency.peak_bytes;
    for (size_t unit = 0; unit < model_.units.size(); ++unit) {
      plan_.parts[unit].traffic.all_gather =
          gathers_of_[unit].times(residency.num_gathers[unit], num_shards);
    }
    finish_sharded_gradients(num_shards);
    // A backward begins and ends with parameters of the root, so the root's gradients are kept to
    // the end.
    add_gradients_on_their_way(root_gradients + largest_gradients);
  }

  struct UnitBytes {
    int64_t full = 0;       // that are taken from the pool
    int64_t gradients = 0;  // whole
  };
  // One gather is an operation for each dtype.
  struct Gathers {
    std::vector<int64_t> payload_bytes;

    OperationTraffic times(int count, int num_shards) const {
      OperationTraffic sum;
      for (const int64_t bytes : payload_bytes) sum += gathered(bytes, num_shards, count);
      return sum;
    }
  };

  UnitBytes add_unit(size_t unit, int num_shards) {
    std::map<DType, Members> by_dtype;
    for (const PlannedParameter& parameter : model_.parameters) {
      if (parameter.unit == unit) by_dtype[parameter.dtype].push_back(&parameter);
    }
    PlannedPart part{.name = unit == 0 ? "root" : format("unit {}", model_.units[unit].name)};
    UnitBytes bytes;
    Gathers gathers;
    for (const auto& [dtype, members] : by_dtype) {
      const FlatLayout layout = unit_layout(members, dtype, num_shards);
      const DType computed = computed_dtype(dtype);
      const int64_t full_bytes = bytes_of(layout.numel(), computed);
      part.numel += numel_of(members);
      part.flat_bytes += full_bytes;
      part.shard_bytes += bytes_of(layout.shard_numel(), dtype);
      plan_.held.parameters += parameter_bytes(layout, dtype, computed);
      // With one rank the whole buffer is the shard, if the dtypes are equal.
      if (!plan_.is_mapped && (num_shards > 1 || computed != dtype)) {
        bytes.full += full_bytes;
        gathers.payload_bytes.push_back(full_bytes);
      }
      int64_t gradient_bytes = 0;
      for (size_t i = 0; i < members.size(); ++i) {
        if (!members[i]->is_trained) continue;
        add_state(*members[i], layout.range(i, shard_index(num_shards)).size());
        gradient_bytes += bytes_of(members[i]->numel(), computed);
      }
      if (gradient_bytes > 0) {
        add_sharded_gradients(part, layout, {.shard = dtype, .computed = computed});
      }
      bytes.gradients += gradient_bytes;
    }
    gathers_of_.push_back(std::move(gathers));
    plan_.parts.push_back(std::move(part));
    return bytes;
  }

  int shard_index(int num_shards) const { return options().rank % num_shards; }

  // Mapped shards consist of whole pages.
  FlatLayout unit_layout(const Members& members, DType dtype, int num_shards) const {
    const int64_t alignment = options().alignment;
    const int64_t page_numel = kPageBytes / static_cast<int64_t>(size_of(computed_dtype(dtype)));
    return {numels_of(members),
            num_shards,
            {.of_shards = options().is_mapped ? std::lcm(alignment, page_numel) : alignment,
             .of_tensors = alignment}};
  }

  // FlatParameters: the shard, and in another compute dtype a copy of it, which peers read.
  int64_t parameter_bytes(const FlatLayout& layout, DType dtype, DType computed) {
    const int num_shards = layout.num_shards();
    int64_t held = symmetric_bytes(bytes_of(layout.shard_numel(), dtype), num_shards);
    if (computed != dtype) {
      held += symmetric_bytes(bytes_of(layout.shard_numel(), computed), num_shards);
    }
    return held;
  }

  // Buffers of ShardedGradients for one dtype.
  struct ReductionNeed {
    int64_t flat_bytes = 0;  // size of the largest bucket
    size_t num_buckets = 0;
    std::vector<int64_t> output_bytes = {};
  };

  const ModelSizes& model_;
  Members trained_;
  MemoryPlan plan_;
  std::map<DType, ReductionNeed> needs_;
  std::vector<Gathers> gathers_of_;  // by unit
  int64_t largest_update_bytes_ = 0;
};

}  // namespace

MemoryPlan plan_memory(const ModelSizes& model, const PlanOptions& options) {
  check_plan_options(options);
  check_model(model);
  return Planner(model, options).run();
}

}  // namespace cadre
