#include "cadre/parallel/fsdp/unit_options.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <optional>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/deferred/materialize.h"
#include "cadre/parallel/shard/division/parameter_division.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/parallel/shard/shardable.h"
#include "cadre/tensor/hooks/autograd_hooks.h"
#include "cadre/tensor/hooks/device_check.h"

namespace cadre::parallel {

void refuse_model(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, format("{}: {}", kFullySharded, what));
}

at::ScalarType compute_dtype_of(at::ScalarType dtype, std::optional<at::ScalarType> parameters) {
  return c10::isFloatingType(dtype) ? parameters.value_or(dtype) : dtype;
}

const ShardPrecision& precision_of(const AssignedUnit& assigned,
                                   const FullyShardedDataParallelOptions& options) {
  const std::optional<ShardPrecision>& own = assigned.options.precision;
  return own ? *own : options.precision;
}

ReshardChoice reshard_of(const AssignedUnit& assigned,
                         const FullyShardedDataParallelOptions& options,
                         const wrap::LocatedGroup& shard) {
  const std::optional<int> size = options.reshard_group_size;
  if (assigned.is_root) {
    return checked_choice("options.reshard_root", options.reshard_root, size, shard);
  }
  const FullyShardOptions& own = assigned.options;
  return checked_choice(format("the reshard of unit \"{}\"", assigned.name),
                        own.reshard.value_or(options.reshard),
                        own.reshard_group_size ? own.reshard_group_size : size, shard);
}

namespace {

std::string dtype_text(std::optional<c10::ScalarType> dtype) {
  return dtype ? c10::toString(*dtype) : "unset";
}

void add_precision(std::vector<AgreedField>& fields, const std::string& of,
                   const ShardPrecision& precision) {
  fields.push_back({of + "precision.parameters", dtype_text(precision.parameters)});
  fields.push_back({of + "precision.reduce", dtype_text(precision.reduce)});
  fields.push_back({of + "precision.outputs", dtype_text(precision.outputs)});
  fields.push_back({of + "precision.cast_inputs", format("{}", precision.cast_inputs)});
}

std::string unit_names(const std::vector<AssignedUnit>& units) {
  std::string names;
  for (size_t i = 1; i < units.size(); ++i) {
    names += format("{}\"{}\"", i == 1 ? "" : ", ", units[i].name);
  }
  return names.empty() ? "none" : names;
}

}  // namespace

std::vector<AgreedField> fields_of(const UnitAssignment& assignment,
                                   const FullyShardedDataParallelOptions& options,
                                   const wrap::LocatedGroup& shard) {
  std::vector<AgreedField> fields = {
      {"the list of units", unit_names(assignment.units)},
      {"options.form", options.form == ShardForm::kMapped ? "kMapped" : "kGathered"},
      {"options.num_prefetched", format("{}", options.num_prefetched)},
      {"options.weighting", std::string(to_string(options.weighting))},
      {"options.broadcast_buffers", format("{}", options.broadcast_buffers)},
      {"options.device",
       options.device ? c10::DeviceTypeName(options.device->type(), /*lower_case=*/true) : "unset"},
      {"options.offload", options.offload ? "set" : "unset"}};
  std::string ignored;
  for (const NamedTensor& parameter : assignment.ignored) ignored += " " + parameter.name;
  fields.push_back({"the list of ignored parameters", format("({})", ignored)});
  for (const AssignedUnit& unit : assignment.units) {
    const ReshardChoice choice = reshard_of(unit, options, shard);
    const std::string of =
        unit.is_root ? "options of the root: " : format("options of \"{}\": ", unit.name);
    fields.push_back({of + "reshard", std::string(to_string(choice.reshard))});
    fields.push_back({of + "reshard_group_size", format("{}", choice.group_size)});
    add_precision(fields, of, precision_of(unit, options));
  }
  return fields;
}

namespace {

void check_precision(const ShardPrecision& precision, const std::string& prefix,
                     const std::string& suffix) {
  const auto check = [&](const char* name, std::optional<c10::ScalarType> dtype) {
    if (!dtype || c10::isFloatingType(*dtype)) return;
    refuse_model(
        format("{}precision.{}{} is {}, which is no floating-point dtype; choose a floating-point "
               "dtype, or leave this option out",
               prefix, name, suffix, c10::toString(*dtype)));
  };
  check("parameters", precision.parameters);
  check("reduce", precision.reduce);
  check("outputs", precision.outputs);
}

// Throws if a unit that is no ShardUnit would have to cast arguments or results of its forward().
void check_casts(const AssignedUnit& unit, const ShardPrecision& own, const ShardPrecision& model) {
  if (unit.unit != nullptr || (!own.outputs && own.parameters == model.parameters)) return;
  refuse_model(format(
      "the policy gives unit \"{}\" another precision.{} than the wrapper has, and only a "
      "cadre::ShardUnit casts the arguments and results of its forward(): declare the module as "
      "ShardUnit<M>, or leave this option out",
      unit.name, own.outputs ? "outputs" : "parameters"));
}

void check_unit_options(const AssignedUnit& unit, const FullyShardedDataParallelOptions& options) {
  const FullyShardOptions& own = unit.options;
  if (own.precision) {
    check_precision(*own.precision, "the ", format(" of unit \"{}\"", unit.name));
    check_casts(unit, *own.precision, options.precision);
  }
  if (!own.reshard_group_size || own.reshard.value_or(options.reshard) == Reshard::kOntoGroup) {
    return;
  }
  refuse_model(
      format("the reshard_group_size of unit \"{}\" is {}, and its reshard is not "
             "Reshard::kOntoGroup: choose Reshard::kOntoGroup, or leave the size out",
             unit.name, *own.reshard_group_size));
}

// Throws if the wrapper's options have a reshard_group_size, but no unit uses Reshard::kOntoGroup.
void check_group_size(const UnitAssignment& assignment,
                      const FullyShardedDataParallelOptions& options) {
  if (!options.reshard_group_size || options.reshard == Reshard::kOntoGroup ||
      options.reshard_root == Reshard::kOntoGroup) {
    return;
  }
  const auto is_onto_group = [](const AssignedUnit& unit) {
    return unit.options.reshard == Reshard::kOntoGroup;
  };
  if (std::ranges::any_of(assignment.units, is_onto_group)) return;
  refuse_model(
      format("options.reshard_group_size is {}, but no unit uses Reshard::kOntoGroup: set this as "
             "the reshard of a unit, or leave reshard_group_size out",
             *options.reshard_group_size));
}

void check_unit(const AssignedUnit& unit, const FullyShardedDataParallelOptions& options,
                const wrap::LocatedGroup& shard) {
  check_unit_options(unit, options);
  const ShardPrecision& precision = precision_of(unit, options);
  if (precision.reduce != options.precision.reduce) {
    refuse_model(
        format("unit \"{}\" has another precision.reduce than the wrapper; gradients of all units "
               "are reduced in one dtype: set it in the wrapper's options, and the same dtype in "
               "the options of the unit",
               unit.name));
  }
  static_cast<void>(reshard_of(unit, options, shard));  // throws if the group size is not allowed
  for (const NamedTensor& parameter : unit.parameters) {
    if (wrap::AccumulationHooks::has_hook(parameter.tensor)) {
      refuse_model(
          format("the parameter \"{}\" is wrapped already, and its gradient can be reduced by one "
                 "wrapper only. Use the first wrapper",
                 parameter.name));
    }
    // Throws if the parameter was divided without a mesh.
    static_cast<void>(shard::division_of(parameter));
    const at::ScalarType dtype = parameter.tensor.scalar_type();
    shard::check_shardable(kFullySharded, {parameter},
                           {.shard = dtype,
                            .compute = compute_dtype_of(dtype, precision.parameters),
                            .may_be_meta = true});
  }
}

// Throws unless all sharded parameters will be on one device that the group reaches.
void check_devices(std::span<const NamedTensor> sharded,
                   const FullyShardedDataParallelOptions& options,
                   const wrap::LocatedGroup& shard) {
  const std::optional<c10::Device> of_group = shard.process_group().device();
  if (options.device && !options.device->is_cpu() && options.device != of_group) {
    refuse_model(
        format("options.device is {}, but this rank's device in the group is {}; choose "
               "that one, or initialize the group with InitOptions::device",
               options.device->str(), of_group ? of_group->str() : "the CPU"));
  }
  if (const auto problem = wrap::beyond_reach(shard.process_group().device(), sharded)) {
    refuse_model(*problem);
  }
  const auto problem = wrap::not_on_one_device(sharded);
  if (problem && !options.device) refuse_model(*problem);
  if (!options.offload) return;
  for (const NamedTensor& parameter : sharded) {
    const c10::Device device = options.device.value_or(parameter.tensor.device());
    if (device.is_cpu() || device.is_meta()) continue;
    refuse_model(
        format("options.offload keeps shards in files, which the CPU reads and writes, "
               "and \"{}\" is on {}: leave offload out, or move the module to the CPU",
               parameter.name, device.str()));
  }
}

}  // namespace

void check_model(const torch::nn::Module& module, const UnitAssignment& assignment,
                 const FullyShardedDataParallelOptions& options, const wrap::LocatedGroup& shard) {
  check_group_size(assignment, options);
  std::vector<NamedTensor> sharded;
  for (const AssignedUnit& unit : assignment.units) {
    check_unit(unit, options, shard);
    sharded.insert(sharded.end(), unit.parameters.begin(), unit.parameters.end());
  }
  check_devices(sharded, options, shard);
  std::vector<NamedTensor> whole = distinct_buffers(module);
  whole.insert(whole.end(), assignment.ignored.begin(), assignment.ignored.end());
  shard::check_apart(kFullySharded, sharded, whole);
  shard::warn_of_other_holders(shard.log_sink(), "fsdp", sharded, whole);
  check_materializable(kFullySharded, sharded);
  check_materializable(kFullySharded, whole);
}

void check_options(const torch::nn::Module* module,
                   const FullyShardedDataParallelOptions& options) {
  if (module == nullptr) {
    refuse_model("the module is null; make it first, for example with std::make_shared<Net>()");
  }
  if (options.num_prefetched < 0 || options.num_prefetched > 1) {
    refuse_model(
        format("options.num_prefetched is {}; choose 0 or 1: prefetching more units costs memory "
               "and does not overlap more communication",
               options.num_prefetched));
  }
  check_precision(options.precision, "options.", "");
  if (options.offload && options.offload->num_states < 0) {
    refuse_model(
        format("options.offload.num_states is {}; it is the number of optimizer-state tensors for "
               "each parameter: choose 0 or more",
               options.offload->num_states));
  }
  if (!options.offload || options.form != ShardForm::kMapped) return;
  refuse_model(
      "options.form is kMapped, and options.offload keeps shards in files, which other ranks "
      "cannot read in place: choose ShardForm::kGathered, or leave offload out");
}

}  // namespace cadre::parallel
