#include "cadre/parallel/plan/memory_plan.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/symmetric/symmetric_heap.h"
#include "cadre/parallel/buckets/gradient_memory.h"
#include "cadre/parallel/fsdp/unit_assignment.h"
#include "cadre/parallel/fsdp/unit_options.h"
#include "cadre/parallel/plan/unit_residency.h"
#include "cadre/parallel/reduction/agreement/sample_weight.h"
#include "cadre/parallel/reduction/agreement/trailer.h"
#include "cadre/parallel/shard/flat_layout.h"
#include "cadre/parallel/shard/step_agreement.h"
#include "cadre/parallel/zero/zero_core.h"
#include "cadre/tensor/group/operands/dtype.h"

namespace cadre {

namespace {

using shard::FlatBuffer;
using shard::FlatMemory;
using Parameters = std::vector<ParameterSize>;

void require(bool holds, const std::string& problem) {
  if (!holds) throw Error(ErrorCode::kInvalidArgument, format("plan_memory: {}", problem));
}

void check_dtype(const char* name, std::optional<DType> dtype) {
  require(!dtype || c10::isFloatingType(to_scalar_type(*dtype)),
          format("{} is not a floating-point dtype", name));
}

void check_sharding(const PlanOptions& options) {
  const bool is_by_units = has_units(options.strategy);
  const std::string_view strategy = to_string(options.strategy);
  require(
      is_by_units || !options.is_mapped,
      format("is_mapped applies to fsdp and hsdp, but the strategy is {}; leave it out", strategy));
  require(!options.is_mapped || !options.is_on_device,
          "is_mapped is for the CPU's memory, but the model is on a device; leave it out");
  require(is_by_units || (!options.parameter_dtype && !options.reduce_dtype),
          format("parameter_dtype and reduce_dtype are for fsdp and hsdp, but the strategy is {}; "
                 "give the parameters themselves the dtype",
                 strategy));
  require(options.strategy == DataStrategy::kHsdp || options.num_replicas == 1,
          format("num_replicas is {}, which is for hsdp, but the strategy is {}; leave it 1",
                 options.num_replicas, strategy));
  require(options.num_replicas >= 1 && options.num_ranks % options.num_replicas == 0,
          format("num_replicas is {}, which does not divide the {} ranks", options.num_replicas,
                 options.num_ranks));
  require(options.reshard != Reshard::kOntoGroup && options.reshard_root != Reshard::kOntoGroup,
          "reshard is kOntoGroup, which cannot be planned; plan kAfterForward, which needs less "
          "memory and transfers as much, and kAfterBackward, which needs more memory");
  require(options.num_prefetched == 0 || options.num_prefetched == 1,
          format("num_prefetched is {}; choose 0 or 1", options.num_prefetched));
  check_dtype("parameter_dtype", options.parameter_dtype);
  check_dtype("reduce_dtype", options.reduce_dtype);
}

void check_options(const PlanOptions& options) {
  require(options.num_ranks >= 1 && options.ranks_per_host >= 1,
          format("num_ranks is {} and ranks_per_host is {}; both must be at least 1",
                 options.num_ranks, options.ranks_per_host));
  require(options.rank >= 0 && options.rank < options.num_ranks,
          format("rank is {}; it must be from 0 to num_ranks - 1, and num_ranks is {}",
                 options.rank, options.num_ranks));
  require(options.strategy != DataStrategy::kSingle || options.num_ranks == 1,
          format("the strategy single is for one rank, but there are {} ranks", options.num_ranks));
  require(options.accumulate >= 1,
          format("accumulate is {}; it must be at least 1", options.accumulate));
  require(options.optimizer.states >= 0 && options.optimizer.temporaries >= 0,
          "optimizer.states or optimizer.temporaries is negative; both must be at least 0");
  check_sharding(options);
}

void check_model(const ModelSizes& model) {
  require(!model.units.empty(), "the model has no units; it must have at least the root");
  for (size_t unit = 1; unit < model.units.size(); ++unit) {
    require(model.units[unit].parent < unit,
            format("unit {} has the parent {}; a parent must come before the units in it", unit,
                   model.units[unit].parent));
  }
  for (const ParameterSize& parameter : model.parameters) {
    require(parameter.unit < model.units.size(),
            format("the parameter \"{}\" is in unit {}, but the model has {} units, whose numbers "
                   "begin with 0, the root",
                   parameter.name, parameter.unit, model.units.size()));
    require(std::ranges::all_of(parameter.sizes, [](int64_t size) { return size >= 0; }),
            format("the parameter \"{}\" has a negative size", parameter.name));
  }
}

OperationTraffic moved(int64_t payload_bytes, int num_ranks, int64_t num_calls, int64_t passes) {
  // Each of N ranks receives N - 1 parts of the payload in an all_gather, and twice as much in an
  // all_reduce. A part is 1/N of the payload, rounded up.
  const int64_t part_bytes = (payload_bytes + num_ranks - 1) / num_ranks;
  return {.num_calls = num_calls,
          .payload_bytes = num_calls * payload_bytes,
          .received_bytes = num_calls * passes * (num_ranks - 1) * part_bytes};
}

// Returns the traffic of an all_gather, which equals that of a reduce_scatter.
OperationTraffic gathered(int64_t payload_bytes, int num_ranks, int64_t num_calls = 1) {
  return moved(payload_bytes, num_ranks, num_calls, /*passes=*/1);
}

OperationTraffic all_reduced(int64_t payload_bytes, int num_ranks) {
  return moved(payload_bytes, num_ranks, /*num_calls=*/1, /*passes=*/2);
}

std::vector<int64_t> numels_of(const Parameters& parameters) {
  std::vector<int64_t> numels;
  for (const ParameterSize& parameter : parameters) numels.push_back(parameter.numel());
  return numels;
}

template <typename Indices>
Parameters picked(const Parameters& parameters, const Indices& indices) {
  Parameters members;
  for (const auto index : indices) members.push_back(parameters[static_cast<size_t>(index)]);
  return members;
}

class Planner {
 public:
  Planner(const ModelSizes& model, const PlanOptions& options) : model_(model) {
    plan_.options = options;
    std::ranges::copy_if(model.parameters, std::back_inserter(trained_),
                         &ParameterSize::is_trained);
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
    // The optimizer runs after all gradients are reduced, so its temporaries do not exist at the
    // same time as gradients that are not reduced.
    plan_.held.transient =
        std::max(plan_.held.transient, options().optimizer.temporaries * largest_update_bytes_);
    for (const PlannedPart& part : plan_.parts) plan_.traffic += part.traffic;
    add_agreements();
    plan_.host_bytes = plan_.held.total() * std::min(options().ranks_per_host, num_ranks());
    return std::move(plan_);
  }

 private:
  const PlanOptions& options() const { return plan_.options; }
  int num_ranks() const { return options().num_ranks; }
  int num_shards() const { return num_ranks() / options().num_replicas; }
  bool has_replicate_axis() const { return options().strategy == DataStrategy::kHsdp; }

  // Adds the traffic of the small messages in which the ranks compare numbers in each step. The
  // trailer, the flags that ranks exchange in each reduction of gradients, is not counted here.
  void add_agreements() {
    if (options().strategy == DataStrategy::kSingle || trained_.empty()) return;
    OperationTraffic& all_reduce = plan_.traffic.all_reduce;
    all_reduce += all_reduced(reduction::kSampleMessageBytes, num_ranks());
    if (options().strategy == DataStrategy::kZero1 || options().strategy == DataStrategy::kZero2) {
      all_reduce += all_reduced(shard::kStepMessageBytes, num_ranks());
    }
    // ShardFence makes this all_reduce at the start of each update.
    if (plan_.is_mapped) all_reduce += all_reduced(sizeof(int64_t), num_shards());
  }

  // Returns the bytes of a flat buffer of the group on one rank. On the CPU it is a
  // SymmetricTensor, which counts as shared memory.
  int64_t flat_bytes(const FlatBuffer& buffer, int group_size) {
    if (buffer.numel == 0) return 0;
    if (options().is_on_device) return buffer.num_bytes();
    const auto held = static_cast<int64_t>(
        SymmetricHeap::held_bytes(static_cast<size_t>(buffer.num_bytes()), group_size));
    plan_.shared_bytes += held;
    return held;
  }

  void plan_replicated() {
    for (const ParameterSize& parameter : model_.parameters) {
      plan_.held.parameters += parameter.num_bytes();
    }
    add_replicated_gradients();
    for (const ParameterSize& parameter : trained_) add_state(parameter, parameter.numel());
  }

  // Adds frozen parameters, which ZeRO stages 1 and 2 do not move into flat buffers.
  void add_frozen() {
    for (const ParameterSize& parameter : model_.parameters) {
      if (!parameter.is_trained) plan_.held.parameters += parameter.num_bytes();
    }
  }

  void plan_zero1() {
    add_frozen();
    add_replicated_gradients();
    const size_t first = plan_.parts.size();
    for (const std::vector<size_t>& members :
         parallel::zero_buckets(trained_, options().zero_bucket_cap_bytes)) {
      PlannedPart part{.name = format("parameters {}", plan_.parts.size() - first)};
      add_whole(part, picked(trained_, members));
      plan_.parts.push_back(std::move(part));
    }
  }

  void plan_zero2() {
    add_frozen();
    int64_t largest_bytes = 0;
    for (const BucketLayout::Bucket& bucket : bucket_layout().buckets) {
      const Parameters members = picked(trained_, bucket.parameters);
      PlannedPart part{.name = format("bucket {}", plan_.parts.size())};
      add_sharded_gradients(part, add_whole(part, members));
      largest_bytes = std::max(largest_bytes, bytes_of_gradients(members));
      plan_.parts.push_back(std::move(part));
    }
    finish_sharded_gradients();
    add_gradients_on_their_way(largest_bytes);
  }

  // Adds a flat buffer of parameters that are whole on every rank, and that are gathered after each
  // step.
  FlatMemory add_whole(PlannedPart& part, const Parameters& members) {
    const FlatMemory memory(numels_of(members), num_ranks(),
                            {.dtype = to_scalar_type(members[0].dtype), .keep_full = true});
    add_flat(part, members, memory);
    part.traffic.all_gather = gathered(part.flat_bytes, num_ranks());
    return memory;
  }

  // Adds the memory of one FlatParameters, and the optimizer state of this rank's shard.
  void add_flat(PlannedPart& part, const Parameters& members, const FlatMemory& memory) {
    const FlatMemory::Buffers buffers = memory.buffers();
    for (const auto& buffer : {buffers.whole, buffers.part, buffers.shard, buffers.sent}) {
      if (buffer) plan_.held.parameters += flat_bytes(*buffer, num_shards());
    }
    const shard::FlatLayout& layout = memory.layout();
    part.flat_bytes +=
        FlatBuffer{.numel = layout.numel(), .dtype = memory.compute_dtype()}.num_bytes();
    for (size_t i = 0; i < members.size(); ++i) {
      part.numel += members[i].numel();
      if (!members[i].is_trained) continue;
      add_state(members[i], layout.range(i, options().rank % num_shards()).size());
    }
  }

  BucketLayout bucket_layout() const {
    return plan_bucket_layout(trained_, reverse_order(trained_.size()), options().bucket_caps);
  }

  // Adds whole gradients. With one rank there are no buckets, because DistributedDataParallel then
  // only calls the module: autograd allocates the gradients.
  void add_replicated_gradients() {
    const int64_t largest_bytes = largest_gradient_bytes();
    if (num_ranks() == 1) {
      plan_.held.gradients = bytes_of_gradients(trained_);
      if (options().accumulate > 1) plan_.held.transient = largest_bytes;
      return;
    }
    const BucketLayout layout = bucket_layout();
    for (const FlatBuffer& buffer :
         replicated_buffers(layout, trained_, reduction::kTrailerNumel)) {
      const size_t bucket = plan_.parts.size();
      PlannedPart part{.name = format("gradients {}", bucket)};
      for (const ParameterSize& member : picked(trained_, layout.buckets[bucket].parameters)) {
        part.numel += member.numel();
      }
      part.flat_bytes = buffer.num_bytes();
      part.traffic.all_reduce = all_reduced(part.flat_bytes, num_ranks());
      plan_.held.gradients += flat_bytes(buffer, num_ranks());
      plan_.parts.push_back(std::move(part));
    }
    // Each gradient exists beside its bucket until it is copied there, so one whole gradient is
    // added.
    add_gradients_on_their_way(largest_bytes);
  }

  // Adds num_bytes for whole gradients that are not reduced yet. If gradients are accumulated under
  // no_sync(), all whole gradients exist outside of the buffers instead, and one more that is being
  // added.
  void add_gradients_on_their_way(int64_t num_bytes) {
    if (options().accumulate > 1) {
      num_bytes = bytes_of_gradients(trained_) + largest_gradient_bytes();
    }
    plan_.held.transient = std::max(plan_.held.transient, num_bytes);
  }

  void add_state(const ParameterSize& parameter, int64_t numel) {
    const int64_t value_bytes = numel * static_cast<int64_t>(size_of(parameter.dtype));
    plan_.held.optimizer_state += options().optimizer.states * value_bytes;
    largest_update_bytes_ = std::max(largest_update_bytes_, value_bytes);
  }

  // Returns the dtype of gathered parameters, in which autograd also computes their gradients.
  at::ScalarType computed_dtype(DType dtype) const {
    const auto parameters = options().parameter_dtype;
    return parallel::compute_dtype_of(
        to_scalar_type(dtype),
        parameters ? std::optional(to_scalar_type(*parameters)) : std::nullopt);
  }

  int64_t bytes_of_gradients(const Parameters& parameters) const {
    int64_t total = 0;
    for (const ParameterSize& parameter : parameters) {
      if (!parameter.is_trained) continue;
      total += FlatBuffer{.numel = parameter.numel(), .dtype = computed_dtype(parameter.dtype)}
                   .num_bytes();
    }
    return total;
  }

  int64_t largest_gradient_bytes() const {
    int64_t largest = 0;
    for (const ParameterSize& parameter : trained_) {
      largest = std::max(largest, bytes_of_gradients({parameter}));
    }
    return largest;
  }

  // Adds the gradients and the traffic of one bucket of ShardedGradients, which belongs to one
  // FlatParameters.
  void add_sharded_gradients(PlannedPart& part, const FlatMemory& memory) {
    const shard::FlatLayout& layout = memory.layout();
    const auto reduce = options().reduce_dtype;
    const ShardedBucketSize bucket{
        .numel = layout.numel(),
        .gradients = {.numel = layout.shard_numel(), .dtype = memory.dtype()},
        .reduce_dtype = reduce ? to_scalar_type(*reduce) : memory.compute_dtype()};
    plan_.held.gradients += has_replicate_axis()
                                ? flat_bytes(bucket.gradients, options().num_replicas)
                                : bucket.gradients.num_bytes();
    const FlatBuffer reduced{.numel = bucket.numel, .dtype = bucket.reduce_dtype};
    part.traffic.reduce_scatter += gathered(reduced.num_bytes(), num_shards());
    if (has_replicate_axis()) {
      part.traffic.all_reduce += all_reduced(bucket.output().num_bytes(), options().num_replicas);
    }
    sharded_.push_back(bucket);
  }

  void finish_sharded_gradients() {
    if (sharded_.empty()) return;
    int64_t& held = plan_.held.reduction_buffers;
    for (const FlatBuffer& buffer : reduction_buffers(sharded_)) {
      held += flat_bytes(buffer, num_shards());
    }
    for (const FlatBuffer& buffer : output_buffers(sharded_, has_replicate_axis())) {
      held += buffer.num_bytes();
    }
    const FlatBuffer trailer{.numel = reduction::kTrailerNumel};
    // The trailer is in the memory of the host, also if the gradients are on a device.
    if (!options().is_on_device) held += flat_bytes(trailer, num_ranks());
    plan_.traffic.all_reduce += all_reduced(trailer.num_bytes(), num_ranks());
  }

  void plan_units() {
    // The ranks that own the shards of one replica are consecutive, because shards lie along the
    // last axis of the mesh. So they are on one host if the number of shards divides
    // ranks_per_host.
    plan_.is_mapped = options().is_mapped && (num_ranks() <= options().ranks_per_host ||
                                              options().ranks_per_host % num_shards() == 0);
    std::vector<ResidentUnit> resident;
    std::vector<OperationTraffic> gathers;
    std::vector<int64_t> gradient_bytes;
    for (size_t unit = 0; unit < model_.units.size(); ++unit) {
      Parameters members;
      std::ranges::copy_if(model_.parameters, std::back_inserter(members),
                           [unit](const ParameterSize& p) { return p.unit == unit; });
      resident.push_back({.parent = model_.units[unit].parent,
                          .reshard = unit == 0 ? options().reshard_root : options().reshard,
                          .has_trained = false});
      gathers.emplace_back();
      gradient_bytes.push_back(bytes_of_gradients(members));
      PlannedPart& part = plan_.parts.emplace_back();
      part.name = unit == 0 ? "root" : format("unit {}", model_.units[unit].name);
      for (const std::vector<size_t>& flat : parallel::flats_of_unit(members)) {
        add_flat_of_unit(part, picked(members, flat), resident.back(), gathers.back());
      }
    }
    const Residency residency = residency_of(
        resident, {.num_prefetched = options().num_prefetched, .accumulate = options().accumulate});
    plan_.held.full_units = residency.peak_bytes;
    for (size_t unit = 0; unit < model_.units.size(); ++unit) {
      for (int i = 0; i < residency.num_gathers[unit]; ++i) {
        plan_.parts[unit].traffic.all_gather += gathers[unit];
      }
    }
    if (num_ranks() > 1) {
      const auto message_bytes = static_cast<int64_t>(sizeof(int64_t)) * num_ranks();
      plan_.traffic.all_gather += gathered(message_bytes, num_ranks(), residency.num_comparisons);
    }
    finish_sharded_gradients();
    // The root's gradients are reduced at the end of the backward, so they exist together with
    // those of each other unit.
    const int64_t root_bytes = std::exchange(gradient_bytes[0], 0);
    add_gradients_on_their_way(root_bytes + std::ranges::max(gradient_bytes));
  }

  // Adds one FlatParameters of a unit. gather: the traffic of one gather of the unit, to which that
  // of this FlatParameters is added.
  void add_flat_of_unit(PlannedPart& part, const Parameters& members, ResidentUnit& unit,
                        OperationTraffic& gather) {
    const DType dtype = members[0].dtype;
    FlatMemory memory(numels_of(members), num_shards(),
                      {.form = options().is_mapped ? ShardForm::kMapped : ShardForm::kGathered,
                       .dtype = to_scalar_type(dtype),
                       .compute_dtype = computed_dtype(dtype)});
    if (plan_.is_mapped && memory.layout().numel() > 0) memory.set_mapped();
    add_flat(part, members, memory);
    part.shard_bytes += memory.layout().shard_numel() * static_cast<int64_t>(size_of(dtype));
    if (const auto buffer = memory.buffers().gathered) {
      unit.full_bytes += buffer->num_bytes();
      gather += gathered(buffer->num_bytes(), num_shards());
    }
    const bool has_trained = std::ranges::any_of(members, &ParameterSize::is_trained);
    unit.has_trained |= has_trained;
    unit.has_frozen |= !std::ranges::all_of(members, &ParameterSize::is_trained);
    if (has_trained) add_sharded_gradients(part, memory);
  }

  const ModelSizes& model_;
  Parameters trained_;
  MemoryPlan plan_;
  std::vector<ShardedBucketSize> sharded_;
  int64_t largest_update_bytes_ = 0;
};

}  // namespace

MemoryPlan plan_memory(const ModelSizes& model, const PlanOptions& options) {
  check_options(options);
  check_model(model);
  return Planner(model, options).run();
}

}  // namespace cadre
