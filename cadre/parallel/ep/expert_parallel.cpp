#include "cadre/parallel/ep/expert_parallel.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <memory>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/ep/mixture_of_experts.h"
#include "cadre/parallel/ep/token_dispatch.h"
#include "cadre/parallel/layers/joint_loss.h"
#include "cadre/parallel/layers/module_division.h"
#include "cadre/parallel/layers/tensor_parallel_layer.h"
#include "cadre/tensor/group/agreement.h"

namespace cadre {
namespace {

[[noreturn]] void refuse_division(const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, format("ExpertParallel: {}", problem));
}

struct NamedLayer {
  std::string name;  // empty for the module itself
  MixtureOfExpertsImpl* layer;
};

// Returns all mixture-of-experts layers in the module, each once, even if it is registered under
// several names.
std::vector<NamedLayer> layers_of(torch::nn::Module& module) {
  std::vector<NamedLayer> layers;
  const auto add = [&](const std::string& name, torch::nn::Module& each) {
    auto* const layer = dynamic_cast<MixtureOfExpertsImpl*>(&each);
    if (layer == nullptr || std::ranges::find(layers, layer, &NamedLayer::layer) != layers.end())
      return;
    layers.push_back({name, layer});
  };
  add("", module);
  for (const auto& child : module.named_modules("", /*include_self=*/false)) {
    add(child.key(), *child.value());
  }
  return layers;
}

void check_layer(const NamedLayer& named, const DeviceMesh& mesh, const std::string& axis) {
  const auto refuse_layer = [&](const std::string& problem) {
    refuse_division(format("\"{}\" cannot be divided along \"{}\" of {}: {}", named.name, axis,
                           mesh.to_string(), problem));
  };
  const int64_t num_experts = named.layer->options.num_experts;
  if (named.layer->is_divided()) {
    refuse_layer("its experts are divided already; divide a module once");
  }
  if (num_experts % mesh.size(axis) != 0) {
    refuse_layer(
        format("{} ranks do not divide its {} experts; take a number of experts that is a "
               "multiple of {}",
               mesh.size(axis), num_experts, mesh.size(axis)));
  }
  for (const auto& parameter : named.layer->named_parameters()) {
    if (!parameter.value().grad().defined()) continue;
    refuse_layer(
        format("its {} has a gradient; divide a module before its first backward, or "
               "zero_grad() before",
               parameter.key()));
  }
}

// Returns the options that must be equal on all ranks. make_equal() compares the names and shapes
// of parameters in addition.
std::vector<AgreedField> fields_of(const std::vector<NamedLayer>& layers, const std::string& axis) {
  std::vector<AgreedField> fields{{"expert_axis", format("\"{}\"", axis)}};
  for (const auto& [name, layer] : layers) {
    const MixtureOfExpertsOptions& options = layer->options;
    fields.push_back(
        {format("the layer \"{}\"", name),
         format("{} of {} experts, normalize_weights {}, capacity_factor {}, activation {}",
                options.num_selected, options.num_experts, options.normalize_weights ? "on" : "off",
                options.capacity_factor ? format("{}", *options.capacity_factor) : "not given",
                static_cast<int>(options.activation))});
  }
  return fields;
}

// Returns the parameters of experts, which will be divided, with the sizes that they have before
// the division.
DividedParameters divided_by(const std::vector<NamedLayer>& layers) {
  DividedParameters divided;
  for (const auto& [name, layer] : layers) {
    auto parameters = layer->named_parameters(/*recurse=*/false);
    for (const std::string& parameter : layer->names_of_expert_parameters()) {
      const at::Tensor& tensor = parameters[parameter];
      const bool is_first = divided
                                .emplace(tensor.unsafeGetTensorImpl(),
                                         DividedParameter{.sizes = tensor.sizes().vec(), .dim = 0})
                                .second;
      if (is_first) continue;
      refuse_division(format(
          "the {} of \"{}\" is also a parameter of another layer of experts; give each layer "
          "its own, or use one layer twice",
          parameter, name));
    }
  }
  return divided;
}

// Throws if a module that is not a layer of experts also has one of the divided parameters: it
// would use this rank's part as if it were the whole parameter.
void check_experts_only_in_layers(torch::nn::Module& module, const DividedParameters& divided) {
  const auto check = [&](const std::string& name, const torch::nn::Module& each) {
    if (dynamic_cast<const MixtureOfExpertsImpl*>(&each) != nullptr) return;
    for (const auto& parameter : each.named_parameters(/*recurse=*/false)) {
      if (!divided.contains(parameter.value().unsafeGetTensorImpl())) continue;
      refuse_division(
          format("the parameter \"{}\" of \"{}\" is also a parameter of experts, of which this "
                 "rank keeps only a part; give the module a tensor of its own",
                 parameter.key(), name));
    }
  };
  check("", module);
  for (const auto& child : module.named_modules("", /*include_self=*/false)) {
    check(child.key(), *child.value());
  }
}

std::shared_ptr<const parallel::ExpertGroups> groups_of(const DeviceMesh& mesh,
                                                        const std::string& axis) {
  const ProcessGroup& tokens = mesh.joint_group();
  const ProcessGroup& experts = mesh.group(axis);
  std::vector<int> members;
  for (const int rank : experts.global_ranks()) members.push_back(tokens.group_rank(rank).value());
  return std::make_shared<const parallel::ExpertGroups>(
      parallel::ExpertGroups{.tokens = tokens, .experts = experts, .members = std::move(members)});
}

// Returns whether the parameter is whole on all ranks of the axis. If an axis is not in the mesh of
// the ParameterShard, the parameter is not divided along it.
bool is_replicated_along(const MeshAxis& axis, const ParameterShard& shard) {
  const auto found = std::ranges::find(shard.mesh.axes(), axis);
  if (found == shard.mesh.axes().end()) return true;
  return shard.placements[static_cast<size_t>(found - shard.mesh.axes().begin())].is_replicate();
}

}  // namespace

ExpertParallel::ExpertParallel(torch::nn::Module& module, const Ranks& ranks,
                               const ExpertParallelOptions& options)
    : mesh_(ranks.mesh_with_axis(options.expert_axis)) {
  const DeviceMesh& mesh = mesh_;
  const std::string& axis = options.expert_axis;
  std::vector<NamedLayer> experts;
  DividedParameters divided;
  const layers::ModuleDivision division(module, mesh, axis, divided, "ExpertParallel");
  check_equal_on_all_ranks(
      mesh.joint_group(), "ExpertParallel",
      [&] {
        experts = layers_of(module);
        if (experts.empty()) {
          refuse_division(
              format("the module \"{}\" has no MixtureOfExperts, so there is nothing to divide "
                     "along \"{}\"",
                     module.name(), axis));
        }
        for (const NamedLayer& named : experts) check_layer(named, mesh, axis);
        divided = divided_by(experts);
        check_experts_only_in_layers(module, divided);
        division.check(mesh.joint_group().device());
        return fields_of(experts, axis);
      },
      "pass the same module with the same options on all ranks");
  const std::shared_ptr<const parallel::ExpertGroups> groups = groups_of(mesh, axis);
  make_equal(module, groups->tokens, "ExpertParallel");
  for (const auto& [name, layer] : experts) layer->divide(groups, name);
  shards_ = division.keep_records();
}

at::Tensor ExpertParallel::mean_over_tokens(const at::Tensor& sum, int64_t count) const {
  return cadre::mean_over_tokens(sum, count, mesh_.joint_group(), "ExpertParallel");
}

void ExpertParallel::sum_gradients(const SumGradientsOptions& options) const {
  sum_gradients(shards_, options);
}

void ExpertParallel::sum_gradients(std::span<const ParameterShard> shards,
                                   const SumGradientsOptions& options) const {
  // mesh_.size() throws if the mesh has no axis of this name.
  for (const std::string& axis : options.reduced_axes) mesh_.size(axis);
  std::map<std::vector<std::string>, std::vector<at::Tensor>> parameters_along;
  for (const ParameterShard& shard : shards) {
    std::vector<std::string> axes;
    for (const MeshAxis& axis : mesh_.axes()) {
      const bool is_reduced =
          std::ranges::find(options.reduced_axes, axis.name) != options.reduced_axes.end();
      if (axis.size > 1 && !is_reduced && is_replicated_along(axis, shard)) {
        axes.push_back(axis.name);
      }
    }
    if (!axes.empty()) parameters_along[axes].push_back(shard.values);
  }
  for (const auto& [axes, parameters] : parameters_along) {
    cadre::sum_gradients(parameters, mesh_.joint_group(axes), "ExpertParallel");
  }
}

}  // namespace cadre
