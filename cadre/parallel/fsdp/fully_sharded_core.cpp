#include "cadre/parallel/fsdp/fully_sharded_core.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/fnv1a.h"
#include "cadre/base/format.h"
#include "cadre/buckets/sharded_gradients.h"
#include "cadre/deferred/materialize.h"
#include "cadre/parallel/fsdp/unit_assignment.h"
#include "cadre/reduction/agreement/trailer.h"
#include "cadre/reduction/data_parallel_core.h"
#include "cadre/shard/flat_buffer_pool.h"
#include "cadre/shard/flat_parameters.h"

namespace cadre {

namespace {

constexpr const char* kWrapper = "FullyShardedDataParallel";
constexpr const char* kRemedy =
    "call the wrapper's forward(), or hold summon_full_params(); an optimizer is made from the "
    "wrapper (model.parameters()), not from the parameters of the module";

[[noreturn]] void refuse_model(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, format("{}: {}", kWrapper, what));
}

std::string text_of(UnitOrder::Pass pass) {
  switch (pass) {
    case UnitOrder::Pass::kForward:
      return "forward()";
    case UnitOrder::Pass::kForwardWithoutGrad:
      return "forward() without grad";
    case UnitOrder::Pass::kBackward:
      break;
  }
  return "backward()";
}

const ShardPrecision& precision_of(const AssignedUnit& assigned,
                                   const FullyShardedDataParallelOptions& options) {
  if (assigned.unit == nullptr || !assigned.unit->binding().options.precision) {
    return options.precision;
  }
  return *assigned.unit->binding().options.precision;
}

Reshard reshard_of(const AssignedUnit& assigned, const FullyShardedDataParallelOptions& options) {
  if (assigned.unit == nullptr) return options.reshard_root;
  if (!assigned.unit->binding().options.reshard) return options.reshard;
  return *assigned.unit->binding().options.reshard;
}

// Otherwise ranks would shard other sets of parameters, and gather each other's.
void check_same_units(const UnitAssignment& assignment,
                      const FullyShardedDataParallelOptions& options, ReplicaGroup& group) {
  Fnv1a digest;
  for (const AssignedUnit& unit : assignment.units) {
    const ShardPrecision& precision = precision_of(unit, options);
    digest.add(format("{}:{}:{}:{};", unit.name, unit.parameters.size(),
                      static_cast<int>(reshard_of(unit, options)),
                      precision.parameters ? static_cast<int>(*precision.parameters) : -1));
  }
  digest.add(format("{}:{}:{}", options.num_prefetched, static_cast<int>(options.weighting),
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
               "beside the root). Call fully_shard() for the same modules with the same options "
               "on all ranks",
               rank, group.rank(), assignment.units.size() - 1));
  }
}

// What ranks compare before they gather for a use that was not expected.
class UseComparison {
 public:
  UseComparison(std::shared_ptr<ReplicaGroup> group, std::vector<std::string> names)
      : group_(std::move(group)), names_(std::move(names)) {}

  void operator()(const UnitSchedule::Use& use) const {
    const int world_size = group_->world_size();
    if (world_size == 1) return;
    const at::Tensor own = at::empty({1}, at::kLong);
    own.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(use.unit) * 4 + code_of(use.pass);
    const at::Tensor all = at::empty({world_size}, at::kLong);
    group_->all_gather(all, own);
    const int64_t* codes = all.const_data_ptr<int64_t>();
    for (int rank = 1; rank < world_size; ++rank) {
      if (codes[rank] == codes[0]) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  format("{}, rank {}: the ranks use different units: rank 0 {}, rank {} {}. Call "
                         "the same units in the same order on all ranks",
                         kWrapper, group_->rank(), text_of_code(codes[0]), rank,
                         text_of_code(codes[rank])));
    }
  }

 private:
  static int64_t code_of(UnitOrder::Pass pass) { return static_cast<int64_t>(pass); }
  std::string text_of_code(int64_t code) const {
    const auto unit = static_cast<size_t>(code / 4);
    if (unit >= names_.size()) return "summon_full_params()";
    return format("{} in {}", unit == 0 ? "the root" : format("\"{}\"", names_[unit]),
                  text_of(static_cast<UnitOrder::Pass>(code % 4)));
  }

  std::shared_ptr<ReplicaGroup> group_;
  std::vector<std::string> names_;
};

// Has the sizes and no memory: to touch its values throws the message.
at::Tensor untouchable(at::IntArrayRef sizes, at::ScalarType dtype, const std::string& message) {
  int64_t num_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) num_bytes *= size;
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(num_bytes),
                       at::DataPtr(nullptr, at::kCPU), /*allocator=*/nullptr, /*resizable=*/false);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

std::vector<std::string> names_of(const std::vector<NamedTensor>& tensors) {
  std::vector<std::string> names;
  for (const NamedTensor& tensor : tensors) names.push_back(tensor.name);
  return names;
}

}  // namespace

ShardGroups ShardGroups::of(const ProcessGroup& world) {
  return {.mesh = DeviceMesh(world, {{"shard", world.world_size()}}),
          .shard_axis = "shard",
          .all = make_replica_group(world),
          .shard = nullptr,
          .replicate = nullptr};
}

ShardGroups ShardGroups::of(const DeviceMesh& mesh) {
  const std::vector<MeshAxis>& axes = mesh.axes();
  if (axes.size() == 1) {
    return {.mesh = mesh,
            .shard_axis = axes[0].name,
            .all = make_replica_group(mesh.group(axes[0].name)),
            .shard = nullptr,
            .replicate = nullptr};
  }
  if (axes.size() > 2) {
    refuse_model(
        format("the mesh {} has {} axes; pass a mesh of one axis (shard), or of two (replicate, "
               "then shard): mesh.slice({{\"replicate\", \"shard\"}})",
               mesh.to_string(), axes.size()));
  }
  return {.mesh = mesh,
          .shard_axis = axes[1].name,
          .all = make_replica_group(mesh.joint_group({axes[0].name, axes[1].name})),
          .shard = make_replica_group(mesh.group(axes[1].name)),
          .replicate = make_replica_group(mesh.group(axes[0].name))};
}

struct FullyShardedCore::Gathered final : UnitMemory {
  bool is_full() const override {
    return std::ranges::all_of(flats, [](const auto& flat) { return flat->is_unsharded(); });
  }
  void gather() override {
    for (const auto& flat : flats) flat->unshard_async();
  }
  void wait_full() override {
    for (const auto& flat : flats) flat->wait_unsharded();
  }
  void release() override {
    for (const auto& flat : flats) flat->reshard();
  }
  void mark_stale() override {
    for (const auto& flat : flats) flat->mark_stale();
  }

  std::vector<std::shared_ptr<FlatParameters>> flats;  // one for each dtype
};

// What the constructor needs until the units run.
struct FullyShardedCore::Construction {
  UnitAssignment assignment;
  std::vector<UnitSchedule::Unit> units = {};
  std::vector<ShardPrecision> precisions = {};

  void shard_unit(FullyShardedCore& core, const AssignedUnit& assigned,
                  const std::shared_ptr<ReplicaGroup>& group, ReplicaGroup& all);
};

void FullyShardedCore::Construction::shard_unit(FullyShardedCore& core,
                                                const AssignedUnit& assigned,
                                                const std::shared_ptr<ReplicaGroup>& group,
                                                ReplicaGroup& all) {
  const bool is_root = assigned.unit == nullptr;
  const FullyShardedDataParallelOptions& options = core.options_;
  const ShardPrecision& precision = precision_of(assigned, options);
  if (precision.reduce != options.precision.reduce) {
    refuse_model(
        format("unit \"{}\" has another precision.reduce than the wrapper; gradients of all "
               "units are reduced alike: set it in the wrapper's options, and the same in "
               "fully_shard()",
               assigned.name));
  }
  // Of one unit at a time, so that no rank ever holds a deferred model whole.
  materialize_from(kWrapper, assigned.parameters, /*root=*/0, all);
  std::map<at::ScalarType, std::vector<NamedTensor>> by_dtype;
  for (const NamedTensor& parameter : assigned.parameters) {
    by_dtype[parameter.tensor.scalar_type()].push_back(parameter);
  }
  auto memory = std::make_unique<Gathered>();
  for (const auto& [dtype, parameters] : by_dtype) {
    memory->flats.push_back(std::make_shared<FlatParameters>(
        parameters, group,
        FlatParameters::Options{
            .compute_dtype = c10::isFloatingType(dtype) ? precision.parameters : std::nullopt,
            .name = is_root ? format("of the root unit of {}", kWrapper)
                            : format("of unit \"{}\" of {}", assigned.name, kWrapper),
            .remedy = kRemedy,
            .pool = core.pool_}));
    core.flats_.push_back(memory->flats.back());
  }
  UnitSchedule::Unit unit{
      .name = assigned.name, .memory = std::move(memory), .reshard = reshard_of(assigned, options)};
  for (const NamedTensor& parameter : assigned.parameters) {
    const auto trained = std::ranges::find_if(
        core.trained_, [&](const at::Tensor& tensor) { return tensor.is_same(parameter.tensor); });
    if (trained == core.trained_.end()) {
      unit.has_frozen = true;
    } else {
      unit.parameters.push_back(static_cast<size_t>(trained - core.trained_.begin()));
    }
  }
  units.push_back(std::move(unit));
  precisions.push_back(precision);
  const bool is_own = !is_root && assigned.unit->binding().options.precision;
  if (!is_own) precisions.back().outputs.reset();  // of the root, the wrapper casts them
}

FullyShardedCore::FullyShardedCore(const std::shared_ptr<torch::nn::Module>& module,
                                   ShardGroups groups, FullyShardedDataParallelOptions options)
    : module_(module),
      groups_(std::move(groups)),
      options_(std::move(options)),
      pool_(std::make_shared<FlatBufferPool>()) {
  if (!module_)
    refuse_model("the module is null; make it first, for example with std::make_shared<Net>()");
  if (options_.num_prefetched < 0 || options_.num_prefetched > 1) {
    refuse_model(
        format("options.num_prefetched is {}; choose 0 or 1: more units ahead cost memory and "
               "hide nothing that one does not",
               options_.num_prefetched));
  }
  Construction construction{.assignment = assign_units(module_, options_)};
  std::vector<NamedTensor> whole = distinct_buffers(*module_);
  std::ranges::copy(construction.assignment.ignored, std::back_inserter(whole));
  materialize_tensors(kWrapper, whole);
  std::shared_ptr<ReplicaGroup> shard_group;
  // The storage may outlive this, with a NoSync.
  const auto made = std::make_shared<std::weak_ptr<ShardedUnits>>();
  const auto make_storage =
      [&](const std::vector<NamedTensor>& trained,
          const std::shared_ptr<ReplicaGroup>& all) -> std::unique_ptr<GradientStorage> {
    for (const NamedTensor& parameter : trained) trained_.push_back(parameter.tensor);
    check_same_units(construction.assignment, options_, *all);
    shard_group = groups_.shard ? groups_.shard : all;
    for (const AssignedUnit& unit : construction.assignment.units) {
      construction.shard_unit(*this, unit, shard_group, *all);
    }
    return std::make_unique<ShardedGradients>(
        trained, flats_,
        ShardedGradients::Groups{.all = all, .shard = shard_group, .replicate = groups_.replicate},
        ShardedGradients::Options{.reduce_dtype = options_.precision.reduce,
                                  .trailer_numel = kTrailerNumel,
                                  .wrapper = kWrapper,
                                  .on_unit_taken = [made](size_t) {
                                    if (const auto units = made->lock()) units->set_reduced();
                                  }});
  };
  core_ = std::make_shared<DataParallelCore>(
      module_, groups_.all,
      DataParallelOptions{.wrapper = kWrapper,
                          .component = "fsdp",
                          .weighting = options_.weighting,
                          .broadcast_buffers = options_.broadcast_buffers,
                          .broadcast_parameters = false,  // shard_unit() does
                          .ignored = names_of(construction.assignment.ignored),
                          .is_idle_alone = false},
      make_storage);
  std::vector<std::string> names;
  for (const AssignedUnit& unit : construction.assignment.units) names.push_back(unit.name);
  auto schedule = std::make_unique<UnitSchedule>(
      std::move(construction.units),
      UnitSchedule::Options{.num_prefetched = options_.num_prefetched,
                            .compare = UseComparison(shard_group, std::move(names)),
                            .has_gradients = [this] { return shards_have_gradients(); },
                            .rank = format("rank {}", groups_.all->rank())});
  units_ = std::make_shared<ShardedUnits>(std::move(schedule), trained_,
                                          std::move(construction.precisions));
  *made = units_;
  units_->set_events({.backward_begins = [this] { clear_refused_gradients(); },
                      .gradients_are_reduced = [this] { refuse_optimizers_of_full_parameters(); }});
  for (size_t i = 1; i < construction.assignment.units.size(); ++i) {
    ShardUnitBase::Binding& binding = construction.assignment.units[i].unit->binding();
    binding.is_sharded = true;
    binding.units = units_;
    binding.index = i;
  }
}

FullyShardedCore::~FullyShardedCore() {
  clear_refused_gradients();
}

ShardedUnits::Call FullyShardedCore::before_forward(std::optional<int64_t> num_rows) {
  if (at::GradMode::is_enabled()) clear_refused_gradients();
  core_->before_forward(module_->is_training(), num_rows);
  return units_->before_forward(0, {});
}

void FullyShardedCore::after_forward(const ShardedUnits::Call& call,
                                     std::span<const at::Tensor> outputs) {
  core_->after_forward(outputs);
  units_->after_forward(call, outputs);
}

void FullyShardedCore::fail_forward() noexcept {
  units_->schedule().abandon();
}

bool FullyShardedCore::casts_inputs() const {
  return options_.precision.cast_inputs && options_.precision.parameters;
}

bool FullyShardedCore::casts_outputs() const {
  return options_.precision.outputs.has_value();
}

at::Tensor FullyShardedCore::cast_input(const at::Tensor& tensor) const {
  return cast_floating(tensor, options_.precision.parameters);
}

at::Tensor FullyShardedCore::cast_output(const at::Tensor& tensor) const {
  return cast_floating(tensor, options_.precision.outputs);
}

void FullyShardedCore::reduce_gradients() {
  clear_refused_gradients();
  core_->reduce_gradients();
  units_->end_reduction();
}

std::vector<ParameterShard> FullyShardedCore::parameter_shards() const {
  std::map<const void*, ParameterShard> by_parameter;
  for (const auto& flat : flats_) {
    for (ParameterShard& shard : flat->parameter_shards(groups_.mesh, groups_.shard_axis)) {
      const void* key = shard.parameter.unsafeGetTensorImpl();
      by_parameter.emplace(key, std::move(shard));
    }
  }
  std::vector<ParameterShard> shards;
  for (const NamedTensor& parameter : distinct_parameters(*module_)) {
    const auto found = by_parameter.find(parameter.tensor.unsafeGetTensorImpl());
    if (found != by_parameter.end()) shards.push_back(std::move(found->second));
  }
  return shards;
}

void FullyShardedCore::summon() {
  units_->schedule().summon();
}

// Parameters in the compute dtype are rounded: where the program has not changed one, its owner
// keeps what it had.
void FullyShardedCore::write_back() {
  const at::NoGradGuard no_grad;
  for (const auto& flat : flats_) {
    const at::ScalarType dtype = flat->shard().scalar_type();
    if (flat->parameters()[0].tensor.scalar_type() == dtype) {
      flat->take_from_parameters();
      continue;
    }
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      const FlatRange range = flat->layout().range(i, flat->group().rank().value);
      const at::Tensor full =
          flat->parameters()[i].tensor.detach().view(-1).narrow(0, range.begin, range.size());
      at::Tensor values = flat->values(i).detach();
      values.copy_(at::where(full.eq(values.to(full.scalar_type())), values, full.to(dtype)));
    }
  }
}

void FullyShardedCore::dismiss() noexcept {
  units_->schedule().dismiss();
}

bool FullyShardedCore::shards_have_gradients() const {
  return std::ranges::any_of(flats_, [](const auto& flat) {
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      if (flat->values(i).grad().defined()) return true;
    }
    return false;
  });
}

int64_t FullyShardedCore::full_bytes() const {
  return pool_->used_bytes();
}

int64_t FullyShardedCore::peak_full_bytes() const {
  return pool_->peak_bytes();
}

// After a reduction the gradients are those of the shards, and the full parameters have none: an
// optimizer that was made from these would leave out every one of them, and nothing would train. A
// gradient that throws when it is touched says so.
void FullyShardedCore::refuse_optimizers_of_full_parameters() {
  if (refused_gradients_.empty()) {
    for (const at::Tensor& parameter : trained_) {
      refused_gradients_.push_back(untouchable(
          parameter.sizes(), parameter.scalar_type(),
          format("The gradients of the module's parameters are gone: {} has reduced them to the "
                 "gradients of the shards. Make the optimizer from the wrapper "
                 "(model.parameters()), and read gradients from parameter_shards(). zero_grad() "
                 "must set gradients to none.",
                 kWrapper)));
    }
  }
  for (size_t i = 0; i < trained_.size(); ++i) {
    at::Tensor& gradient = trained_[i].mutable_grad();
    if (!gradient.defined()) gradient = refused_gradients_[i];
  }
}

void FullyShardedCore::clear_refused_gradients() {
  for (size_t i = 0; i < refused_gradients_.size(); ++i) {
    at::Tensor& gradient = trained_[i].mutable_grad();
    if (gradient.is_same(refused_gradients_[i])) gradient.reset();
  }
}

}  // namespace cadre
