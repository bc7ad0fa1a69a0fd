#include "cadre/parallel/fsdp/fully_sharded_core.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/base/log.h"
#include "cadre/parallel/buckets/sharded_gradients.h"
#include "cadre/parallel/deferred/materialize.h"
#include "cadre/parallel/fsdp/offload.h"
#include "cadre/parallel/fsdp/reshard_groups.h"
#include "cadre/parallel/fsdp/unit_assignment.h"
#include "cadre/parallel/fsdp/unit_options.h"
#include "cadre/parallel/fsdp/use_comparison.h"
#include "cadre/parallel/fsdp/written_parameters.h"
#include "cadre/parallel/reduction/agreement/trailer.h"
#include "cadre/parallel/reduction/data_parallel_core.h"
#include "cadre/parallel/shard/division/parameter_division.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/flat_storage.h"
#include "cadre/parallel/shard/shard_fence.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/file_memory.h"
#include "cadre/tensor/hooks/device_check.h"
#include "cadre/tensor/hooks/tensor_version.h"
#include "cadre/tensor/mesh/whole_axes.h"

namespace cadre::parallel {

namespace {

constexpr const char* kRemedy =
    "call the wrapper's forward(), or hold summon_full_params(). Make an optimizer from the "
    "wrapper (model.parameters()), not from the parameters of the module. Save and load snapshots "
    "with cadre::parts_of(model.parameter_shards(), module). Use the graph of a "
    "derivative (autograd::grad() with create_graph) before the wrapper's next backward. A module "
    "whose forward() reads memory without an operation of libtorch must be a cadre::ShardUnit";

// The remedy if requires_grad of a parameter was changed after the module was wrapped.
constexpr const char* kChangeRemedy =
    "Which parameters of a sharded module are trained cannot be changed: choose it before the "
    "module is wrapped. To change it later, save a snapshot, construct the module again with the "
    "change, wrap it, load the parameters of the snapshot and make a new optimizer, on all ranks";

// Gives values to deferred buffers and deferred ignored parameters, which every rank has whole, and
// moves all of these to the device, if one is given.
void materialize_unsharded(const torch::nn::Module& module, const UnitAssignment& assignment,
                           const std::optional<c10::Device>& device) {
  std::vector<NamedTensor> whole = distinct_buffers(module);
  std::ranges::copy(assignment.ignored, std::back_inserter(whole));
  materialize_tensors(kFullySharded, whole);
  if (device) move_tensors(whole, *device);
}

// Returns whether this rank has the first part of each parameter that is divided already, as by
// tensor parallelism. It is false for all other ranks along the axes of that division, which have a
// wrapper of the same model each.
bool has_first_parts(const UnitAssignment& assignment) {
  for (const AssignedUnit& unit : assignment.units) {
    for (const NamedTensor& parameter : unit.parameters) {
      const auto division = shard::division_of(parameter);
      if (!division) continue;
      const std::vector<int>& coordinates = division->mesh.coordinates();
      if (std::ranges::any_of(coordinates, [](int coordinate) { return coordinate != 0; })) {
        return false;
      }
    }
  }
  return true;
}

// Logs a warning if the model has no units, because then only the gradients and the optimizer state
// need less memory.
void warn_without_units(const UnitAssignment& assignment, bool has_policy,
                        const wrap::LocatedGroup& group) {
  if (assignment.units.size() > 1 || group.world_size() == 1 || group.rank() != 0) return;
  if (!has_first_parts(assignment)) return;
  group.log_sink().write(
      LogLevel::kWarning, "fsdp",
      format("the model has no unit beside the root parameters={} effect=\"every forward gathers "
             "all parameters at once and keeps them until the end of backward; {}\"",
             assignment.units[0].parameters.size(),
             has_policy ? "options.wrap_policy has chosen none of the modules"
                        : "set options.wrap_policy, to cadre::wrap_by_type<BlockImpl>() for "
                          "example"));
}

std::vector<std::string> names_of(const std::vector<NamedTensor>& tensors) {
  std::vector<std::string> names;
  for (const NamedTensor& tensor : tensors) names.push_back(tensor.name);
  return names;
}

// Lets operations on the parameters and on the shards report to the units.
void observe(const UnitAssignment& assignment,
             std::span<const std::shared_ptr<shard::FlatParameters>> flats, ShardedUnits& units) {
  std::vector<std::vector<NamedTensor>> parameters;
  for (const AssignedUnit& unit : assignment.units) parameters.push_back(unit.parameters);
  std::vector<at::Tensor> shards;
  for (const auto& flat : flats) {
    shards.push_back(flat->shard());
    for (size_t i = 0; i < flat->parameters().size(); ++i) shards.push_back(flat->values(i));
  }
  units.observe(std::move(parameters), std::move(shards));
}

// Connects the units to the schedule, which is called in each forward of a unit from now on. No
// module of the model can become a unit any more.
void bind_units(const torch::nn::Module& module, const UnitAssignment& assignment,
                const std::shared_ptr<ShardedUnits>& units) {
  for (const auto& part : module.modules(/*include_self=*/false)) {
    auto* const unit = dynamic_cast<ShardUnitBase*>(part.get());
    if (unit != nullptr) unit->binding().is_wrapped = true;
  }
  for (size_t i = 1; i < assignment.units.size(); ++i) {
    if (assignment.units[i].unit == nullptr) continue;
    ShardUnitBase::Binding& binding = assignment.units[i].unit->binding();
    binding.is_sharded = true;
    binding.units = units;
    binding.index = i;
  }
}

}  // namespace

ShardGroups ShardGroups::of(const Ranks& ranks) {
  const DeviceMesh mesh = ranks.mesh_with_axis("shard");
  const std::vector<MeshAxis>& axes = mesh.axes();
  if (axes.size() == 1) {
    return {.mesh = mesh,
            .shard_axis = axes[0].name,
            .all = ranks.group(),
            .shard = std::nullopt,
            .replicate = std::nullopt};
  }
  if (axes.size() > 2) {
    refuse_model(
        format("the mesh {} has {} axes; pass a mesh of one axis (shard), or of two (replicate, "
               "then shard): mesh.slice({{\"replicate\", \"shard\"}})",
               mesh.to_string(), axes.size()));
  }
  return {.mesh = mesh,
          .shard_axis = axes[1].name,
          .all = ranks.group(),
          .shard = mesh.group(axes[1].name),
          .replicate = mesh.group(axes[0].name)};
}

namespace {

// If the module's parameters are divided along a mesh already, and an axis of that mesh consists of
// the ranks of the wrapper, returns `groups` with that axis instead of a new mesh.
ShardGroups on_mesh_of(ShardGroups groups, const torch::nn::Module& module) {
  for (const NamedTensor& parameter : distinct_parameters(module)) {
    const auto division = shard::division_of(parameter);
    if (!division) continue;
    if (const auto axis = mesh::axis_of(division->mesh, groups.all); axis && !groups.shard) {
      groups.mesh = *axis;
      groups.shard_axis = axis->axes()[0].name;
    }
    // Throws if the two meshes cannot be combined into one.
    static_cast<void>(groups.mesh.joined_with(division->mesh));
  }
  return groups;
}

}  // namespace

struct FullyShardedCore::Gathered final : UnitMemory {
  bool is_full() const override {
    return std::ranges::all_of(
        flats, [](const auto& flat) { return flat->is_unsharded() || flat->is_gathering(); });
  }
  void gather() override {
    for (const auto& flat : flats) flat->unshard_async();
  }
  void wait_full() override {
    for (const auto& flat : flats) flat->wait_unsharded();
  }
  void release() override {
    for_all(flats, [](const auto& flat) { flat->reshard(); });
  }
  void release_onto_group() override {
    for_all(flats, [](const auto& flat) { flat->reshard_onto_group(); });
  }
  void mark_stale() override {
    for_all(flats, [](const auto& flat) { flat->mark_stale(); });
  }
  bool is_outdated() const override {
    return std::ranges::any_of(flats, [](const auto& flat) { return flat->is_outdated(); });
  }

  std::vector<std::shared_ptr<shard::FlatParameters>> flats;  // one for each dtype
};

// What only the constructor needs.
struct FullyShardedCore::Construction {
  UnitAssignment assignment;
  std::optional<ReshardGroups> reshard_groups = {};
  std::vector<UnitSchedule::Unit> units = {};
  std::vector<ShardPrecision> precisions = {};

  void shard_unit(FullyShardedCore& core, const AssignedUnit& assigned,
                  const wrap::LocatedGroup& group, const wrap::LocatedGroup& all);
  void make_flats(FullyShardedCore& core, const AssignedUnit& assigned,
                  const wrap::LocatedGroup& group, const std::optional<wrap::LocatedGroup>& onto,
                  Gathered& memory);
};

void FullyShardedCore::Construction::make_flats(FullyShardedCore& core,
                                                const AssignedUnit& assigned,
                                                const wrap::LocatedGroup& group,
                                                const std::optional<wrap::LocatedGroup>& onto,
                                                Gathered& memory) {
  const FullyShardedDataParallelOptions& options = core.options_;
  const ShardPrecision& precision = precision_of(assigned, options);
  const bool is_root = assigned.is_root;
  for (const std::vector<size_t>& members : flats_of_unit(sizes_of(assigned.parameters))) {
    std::vector<NamedTensor> parameters;
    for (const size_t index : members) parameters.push_back(assigned.parameters[index]);
    const at::ScalarType dtype = parameters[0].tensor.scalar_type();
    memory.flats.push_back(std::make_shared<shard::FlatParameters>(
        std::move(parameters), group,
        shard::FlatParameters::Options{
            .form = options.form,
            .compute_dtype = compute_dtype_of(dtype, precision.parameters),
            .name = is_root ? format("of the root unit of {}", kFullySharded)
                            : format("of unit \"{}\" of {}", assigned.name, kFullySharded),
            .remedy = kRemedy,
            .pool = core.pool_,
            .fence = core.fence_,
            .files = core.files_,
            .reshard_group = onto,
            .on_written = [written = core.written_](const std::string& parameter,
                                                    const Error& error) {
              written->tell(parameter, error);
            }}));
    core.flats_.push_back(memory.flats.back());
  }
}

void FullyShardedCore::Construction::shard_unit(FullyShardedCore& core,
                                                const AssignedUnit& assigned,
                                                const wrap::LocatedGroup& group,
                                                const wrap::LocatedGroup& all) {
  const FullyShardedDataParallelOptions& options = core.options_;
  const ShardPrecision& precision = precision_of(assigned, options);
  // Gives values to the parameters of this unit only, and shards them at once, so that no rank ever
  // holds all parameters of a deferred model.
  materialize_from(kFullySharded, assigned.parameters, /*root=*/0, all);
  const c10::Device device = options.device.value_or(
      assigned.parameters.empty() ? c10::Device(at::kCPU) : assigned.parameters[0].tensor.device());
  const ReshardChoice choice = reshard_of(assigned, options, group);
  const auto onto = reshard_groups->group_of(choice);
  auto memory = std::make_unique<Gathered>();
  wrap::make_on_all_ranks(all.process_group(), kFullySharded, device, [&] {
    if (options.device) move_tensors(assigned.parameters, device);
    make_flats(core, assigned, group, onto, *memory);
  });
  UnitSchedule::Unit unit{.name = assigned.name,
                          .memory = std::move(memory),
                          .parent = assigned.parent,
                          .reshard = choice.reshard};
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
  const bool is_own = assigned.options.precision.has_value();
  if (!is_own) precisions.back().outputs.reset();  // the wrapper casts the root's outputs
}

namespace {

// Returns options with which ShardedGradients reports reductions to the schedule of the units.
// units: expires when the wrapper is destroyed.
ShardedGradients::Options gradient_options(
    std::optional<at::ScalarType> reduce_dtype, size_t num_late_units,
    const std::shared_ptr<std::weak_ptr<ShardedUnits>>& units) {
  return {.reduce_dtype = reduce_dtype,
          .trailer_numel = reduction::kTrailerNumel,
          .num_late_units = num_late_units,
          .wrapper = kFullySharded,
          .remedy = "Make the optimizer from the wrapper (model.parameters())",
          .on_unit_taken =
              [units](size_t) {
                if (const auto alive = units->lock()) alive->set_reduced();
              },
          .on_pass =
              [units] {
                if (const auto alive = units->lock()) alive->schedule().begin_reduction();
              },
          .on_cleared =
              [units] {
                if (const auto alive = units->lock()) alive->schedule().expect_changes();
              },
          .on_abandoned_launch =
              [units](size_t launch) {
                if (const auto alive = units->lock()) alive->schedule().follow_others(launch);
              }};
}

// gradients: points to null until the gradient storage is constructed.
reduction::DataParallelOptions data_parallel_options(
    const FullyShardedDataParallelOptions& options, std::vector<std::string> ignored,
    const std::shared_ptr<GradientStorage*>& gradients,
    const std::shared_ptr<WrittenParameters>& written) {
  return {.wrapper = kFullySharded,
          .component = "fsdp",
          .weighting = options.weighting,
          .broadcast_buffers = options.broadcast_buffers,
          .broadcast_parameters = false,  // shard_unit() broadcasts the parameters
          .ignored = std::move(ignored),
          .is_idle_alone = false,
          .needs_trained = false,
          .change_remedy = kChangeRemedy,
          // Looks, in a forward without grad, for gradients that the program has cleared: an
          // optimizer step without gradients may then have changed the shards (expect_changes()).
          .before_forward =
              [gradients] {
                if (at::GradMode::is_enabled() || !*gradients) return;
                (*gradients)->forget_cleared(std::nullopt);
              },
          .written_error =
              [written](const std::string& parameter, const std::string& ranks) {
                return written->pass_error(parameter, ranks);
              }};
}

}  // namespace

UnitAssignment FullyShardedCore::agreed_assignment() {
  UnitAssignment assignment;
  const auto make_fields = [&] {
    wrap::refuse_inference_mode(kFullySharded);
    check_options(module_.get(), options_);
    groups_ = on_mesh_of(groups_, *module_);
    assignment = assign_units(module_, options_);
    const wrap::LocatedGroup shard(groups_.shard ? *groups_.shard : groups_.all);
    check_model(*module_, assignment, options_, shard);
    return fields_of(assignment, options_, shard);
  };
  check_equal_on_all_ranks(groups_.all, kFullySharded, make_fields,
                           "call fully_shard() for the same modules, and give it and the wrapper "
                           "the same options, on all ranks");
  return assignment;
}

FullyShardedCore::FullyShardedCore(const std::shared_ptr<torch::nn::Module>& module,
                                   ShardGroups groups, FullyShardedDataParallelOptions options)
    : module_(module),
      groups_(std::move(groups)),
      options_(std::move(options)),
      pool_(std::make_shared<shard::FlatBufferPool>()),
      fence_(std::make_shared<shard::ShardFence>(groups_.all)),
      written_(std::make_shared<WrittenParameters>()) {
  Construction construction{.assignment = agreed_assignment()};
  std::optional<wrap::LocatedGroup> all_ranks;
  wrap::make_on_all_ranks(
      groups_.all, kFullySharded, options_.device.value_or(c10::Device(at::kCPU)),
      [&] { materialize_unsharded(*module_, construction.assignment, options_.device); });
  // The gradient storage may outlive this object, because a NoSync shares it; so it refers to the
  // units by a weak_ptr.
  const auto made = std::make_shared<std::weak_ptr<ShardedUnits>>();
  const auto gradients = std::make_shared<GradientStorage*>(nullptr);
  const auto make_storage = [&](const std::vector<NamedTensor>& trained,
                                const wrap::LocatedGroup& all) -> std::unique_ptr<GradientStorage> {
    for (const NamedTensor& parameter : trained) trained_.push_back(parameter.tensor);
    all_ranks = all;
    const wrap::LocatedGroup shard_group = groups_.shard ? wrap::LocatedGroup(*groups_.shard) : all;
    warn_without_units(construction.assignment, static_cast<bool>(options_.wrap_policy), all);
    files_ =
        open_offload(options_.offload, construction.assignment, {.all = all, .shard = shard_group});
    construction.reshard_groups.emplace(shard_group);
    size_t num_root_flats = 0;
    for (const AssignedUnit& unit : construction.assignment.units) {
      construction.shard_unit(*this, unit, shard_group, all);
      if (unit.is_root) num_root_flats = flats_.size();
    }
    // Gradients are reduced in the reverse order of the units, as the first backward computes them.
    // In another order the whole gradients of all units would be in memory at the same time.
    const std::vector<std::shared_ptr<shard::FlatParameters>> reversed(flats_.rbegin(),
                                                                       flats_.rend());
    auto storage = std::make_unique<ShardedGradients>(
        trained, reversed,
        ShardedGradients::Groups{.all = all, .shard = shard_group, .replicate = groups_.replicate},
        gradient_options(options_.precision.reduce, num_root_flats, made));
    *gradients = storage.get();
    return storage;
  };
  core_ = std::make_shared<reduction::DataParallelCore>(
      module_, groups_.all,
      data_parallel_options(options_, names_of(construction.assignment.ignored), gradients,
                            written_),
      make_storage);
  std::vector<std::string> names;
  for (const AssignedUnit& unit : construction.assignment.units) names.push_back(unit.name);
  auto schedule = std::make_unique<UnitSchedule>(
      std::move(construction.units),
      UnitSchedule::Options{.num_prefetched = options_.num_prefetched,
                            .compare = UseComparison(*all_ranks, std::move(names)),
                            .has_gradients = [this] { return shards_have_gradients(); },
                            .num_updates = [fence = fence_] { return fence->num_updates(); },
                            .rank = wrap::LocatedGroup(groups_.all).rank_text()});
  units_ = std::make_shared<ShardedUnits>(std::move(schedule), trained_,
                                          std::move(construction.precisions));
  *made = units_;
  observe(construction.assignment, flats_, *units_);
  written_->attach(core_, form());
  bind_units(*module_, construction.assignment, units_);
}

FullyShardedCore::~FullyShardedCore() = default;

ShardedUnits::Call FullyShardedCore::before_forward(std::optional<int64_t> num_rows) {
  core_->before_forward(module_->is_training(), num_rows);
  units_->check_observed();
  ShardedUnits::Call call = units_->before_forward(0, {});
  // begin_evaluation() comes after the calls above, because these may find writes that were made
  // before this forward, which must not count for it.
  if (!at::GradMode::is_enabled()) written_->begin_evaluation();
  return call;
}

void FullyShardedCore::after_forward(const ShardedUnits::Call& call,
                                     std::span<const at::Tensor> outputs) {
  core_->after_forward(outputs);
  units_->after_forward(call, outputs);
}

void FullyShardedCore::check_evaluation() {
  if (!written_->is_in_evaluation()) return;
  for (const auto& flat : flats_) flat->check_written();
  if (const auto error = written_->end_evaluation()) throw *error;
}

void FullyShardedCore::fail_forward() noexcept {
  units_->schedule().abandon();
  static_cast<void>(written_->end_evaluation());
}

bool FullyShardedCore::casts_inputs() const {
  return options_.precision.cast_inputs && options_.precision.parameters;
}

bool FullyShardedCore::casts_outputs() const {
  return options_.precision.outputs.has_value();
}

int64_t FullyShardedCore::file_bytes() const {
  return files_ ? files_->used_bytes() : 0;
}

at::Tensor FullyShardedCore::cast_input(const at::Tensor& tensor) const {
  return cast_floating(tensor, options_.precision.parameters);
}

at::Tensor FullyShardedCore::cast_output(const at::Tensor& tensor) const {
  return cast_floating(tensor, options_.precision.outputs);
}

void FullyShardedCore::reduce_gradients() {
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
  try {
    for (const auto& flat : flats_) flat->make_private();
  } catch (...) {
    dismiss();
    throw;
  }
}

void FullyShardedCore::write_back() {
  shard::FencedUpdate update(fence_);
  for (const auto& flat : flats_) flat->take_from_parameters();
  update.finish();
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

ShardForm FullyShardedCore::form() const {
  const bool is_mapped = !flats_.empty() && std::ranges::all_of(flats_, [](const auto& flat) {
    return flat->is_mapped() || flat->layout().numel() == 0;
  });
  return is_mapped ? ShardForm::kMapped : ShardForm::kGathered;
}

int64_t FullyShardedCore::full_bytes() const {
  return pool_->used_bytes();
}

int64_t FullyShardedCore::peak_full_bytes() const {
  return pool_->peak_bytes();
}

FullyShardedCore& checked(const std::shared_ptr<FullyShardedCore>& core, std::string_view owner) {
  if (core) return *core;
  throw Error(ErrorCode::kInvalidArgument,
              format("cadre::{}: this object was moved from, or its wrapper was; use the object "
                     "that it was moved to",
                     owner));
}

}  // namespace cadre::parallel
