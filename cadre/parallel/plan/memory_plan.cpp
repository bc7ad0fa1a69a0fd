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
  require(is_by_units || (!options.parameter_dtype && !options.reduce_dtype),
          format("parameter_dtype and reduce_dtype are for fsdp and hsdp, the strategy is {}; give "
                 "the parameters themselves the dtype",
                 strategy));
  require(options.strategy == DataStrategy::kHsdp || options.num_replicas == 1,
          format("num_replicas is {}, which is for hsdp, the strategy is {}; leave it 1",
                 options.num_replicas, strategy));
  require(options.num_replicas >= 1 && options.num_ranks % options.num_replicas == 0,
          format("num_replicas is {}, which does not divide the {} ranks", options.num_replicas,
                 options.num_ranks));
  require(options.reshard != Reshard::kOntoGroup && options.reshard_root != Reshard::kOntoGroup,
          "reshard is kOntoGroup, which cannot be planned; plan kAfterForward, which holds less "
          "and moves as much, and kAfterBackward, which holds more");
  require(options.num_prefetched == 0 || options.num_prefetched == 1,
          format("num_prefetched is {}; choose 0 or 1", options.num_prefetched));
  check_dtype("parameter_dtype", options.parameter_dtype);
  check_dtype("reduce_dtype", options.reduce_dtype);
}

void check_options(const PlanOptions& options) {
  require(options.num_ranks >= 1 && options.ranks_per_host >= 1,
          format("{} ranks, {} on each host; both must be at least 1", options.num_ranks,
                 options.ranks_per_host));
  require(options.rank >= 0 && options.rank < options.num_ranks,
          format("rank {} of {}", options.rank, options.num_ranks));
  require(options.strategy != DataStrategy::kSingle || options.num_ranks == 1,
          format("the strategy single is for one rank, but there are {} ranks", options.num_ranks));
  require(options.accumulate >= 1,
          format("accumulate is {}; it must be at least 1", options.accumulate));
  require(options.optimizer.states >= 0 && options.optimizer.temporaries >= 0,
          "the optimizer has a negative number of states");
  check_sharding(options);
}

void check_model(const ModelSizes& model) {
  require(!model.units.empty(), "the model has no units; the first is the root");
  for (size_t unit = 1; unit < model.units.size(); ++unit) {
    require(model.units[unit].parent < unit,
            format("unit {} has the parent {}; a parent must come before the units in it", unit,
                   model.units[unit].parent));
  }
  for (const ParameterSize& parameter : model.parameters) {
    require(parameter.unit < model.units.size(),
            format("\"{}\" is in unit {}, but the model has {} units, numbered from 0, the root",
                   parameter.name, parameter.unit, model.units.size()));
    require(std::ranges::all_of(parameter.sizes, [](int64_t size) { return size >= 0; }),
            format("\"{}\" has a negative size", parameter.name));
  }
}

OperationTraffic moved(int64_t payload_bytes, int num_ranks, int64_t num_calls, int64_t passes) {
  // Each rank has one of N equal parts of the payload.
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
    // The optimizer runs when all gradients are reduced.
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

  // Adds the messages in which ranks compare numbers in each step, which come in addition to the
  // trailer of the gradients.
  void add_agreements() {
    if (options().strategy == DataStrategy::kSingle || trained_.empty()) return;
    OperationTraffic& all_reduce = plan_.traffic.all_reduce;
    all_reduce += all_reduced(reduction::kSampleMessageBytes, num_ranks());
    if (options().strategy == DataStrategy::kZero1 || options().strategy == DataStrategy::kZero2) {
      all_reduce += all_reduced(shard::kStepMessageBytes, num_ranks());
    }
    // ShardFence sends this message at the start of an update.
    if (plan_.is_mapped) all_reduce += all_reduced(sizeof(int64_t), num_shards());
  }

  // Returns the bytes of a SymmetricTensor on one rank.
  int64_t symmetric_bytes(const FlatBuffer& buffer, int group_size) {
    if (buffer.numel == 0) return 0;
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

  // Adds parameters that are not trained. Stages 1 and 2 do not move them.
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

  // Adds parameters that are whole on every rank and gathered after a step.
  FlatMemory add_whole(PlannedPart& part, const Parameters& members) {
    const FlatMemory memory(numels_of(members), num_ranks(),
                            {.dtype = to_scalar_type(members[0].dtype), .keep_full = true});
    add_flat(part, members, memory);
    part.traffic.all_gather = gathered(part.flat_bytes, num_ranks());
    return memory;
  }

  // Adds one FlatParameters, and the optimizer's state for it.
  void add_flat(PlannedPart& part, const Parameters& members, const FlatMemory& memory) {
    const FlatMemory::Buffers buffers = memory.buffers();
    for (const auto& buffer : {buffers.whole, buffers.part, buffers.shard, buffers.sent}) {
      if (buffer) plan_.held.parameters += symmetric_bytes(*buffer, num_shards());
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

  // In a group of one DistributedDataParallel only calls the module, and autograd allocates the
  // gradients.
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
      plan_.held.gradients += symmetric_bytes(buffer, num_ranks());
      plan_.parts.push_back(std::move(part));
    }
    // A gradient is copied to its bucket when it is complete, and then freed.
    add_gradients_on_their_way(largest_bytes);
  }

  // Adds gradients that are not reduced yet. Backwards without reduction accumulate whole gradients
  // outside of the buffers.
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

  // Autograd computes gradients in the dtype of the gathered parameters.
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

  // Adds the memory that ShardedGradients allocates for one FlatParameters with trained parameters.
  void add_sharded_gradients(PlannedPart& part, const FlatMemory& memory) {
    const shard::FlatLayout& layout = memory.layout();
    const auto reduce = options().reduce_dtype;
    const ShardedBucketSize bucket{
        .numel = layout.numel(),
        .gradients = {.numel = layout.shard_numel(), .dtype = memory.dtype()},
        .reduce_dtype = reduce ? to_scalar_type(*reduce) : memory.compute_dtype()};
    plan_.held.gradients += has_replicate_axis()
                                ? symmetric_bytes(bucket.gradients, options().num_replicas)
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
      held += symmetric_bytes(buffer, num_shards());
    }
    for (const FlatBuffer& buffer : output_buffers(sharded_, has_replicate_axis())) {
      held += buffer.num_bytes();
    }
    const FlatBuffer trailer{.numel = reduction::kTrailerNumel};
    held += symmetric_bytes(trailer, num_ranks());
    plan_.traffic.all_reduce += all_reduced(trailer.num_bytes(), num_ranks());
  }

  void plan_units() {
    // Shards are along the last axis of the mesh, so a shard group has consecutive ranks.
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
    // A backward begins and ends with parameters of the root, so the root's gradients exist until
    // its end.
    const int64_t root_bytes = std::exchange(gradient_bytes[0], 0);
    add_gradients_on_their_way(root_bytes + std::ranges::max(gradient_bytes));
  }

  // Adds one FlatParameters of a unit. gather: the operations that gather the unit once.
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
