#include "cadre/parallel/ep/expert_parallel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <memory>

#include "cadre/base/error.h"
#include "cadre/base/fnv1a.h"
#include "cadre/base/format.h"
#include "cadre/layers/common_refusal.h"
#include "cadre/layers/joint_loss.h"
#include "cadre/layers/tensor_parallel_layer.h"
#include "cadre/parallel/ep/mixture_of_experts.h"
#include "cadre/parallel/ep/token_dispatch.h"

namespace cadre {
namespace {

[[noreturn]] void refuse_division(const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, format("ExpertParallel: {}", problem));
}

struct NamedLayer {
  std::string name;  // empty for the module itself
  MixtureOfExpertsImpl* layer;
};

// Each layer once, also if it is registered under several names.
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

// What must be equal on all ranks beside names and shapes, which make_equal() compares.
std::string text_of(const std::vector<NamedLayer>& layers, const std::string& axis) {
  std::string text = format("along \"{}\"", axis);
  for (const auto& [name, layer] : layers) {
    const MixtureOfExpertsOptions& options = layer->options;
    text += format(
        ", \"{}\" with {} of {} experts, normalize_weights {}, capacity_factor {}, activation {}",
        name, options.num_selected, options.num_experts, options.normalize_weights ? "on" : "off",
        options.capacity_factor ? format("{}", *options.capacity_factor) : "not given",
        static_cast<int>(options.activation));
  }
  return text;
}

void check_equal_on_all(const std::string& text, const ProcessGroup& group) {
  Fnv1a digest;
  digest.add(text);
  const at::Tensor own = at::tensor({static_cast<int64_t>(digest.value())}, at::kLong);
  const at::Tensor all = at::empty({group.world_size()}, at::kLong);
  group.all_gather_into_tensor(all, own);
  const int64_t* const digests = all.const_data_ptr<int64_t>();
  for (int rank = 1; rank < group.world_size(); ++rank) {
    if (digests[rank] == digests[0]) continue;
    refuse_division(
        format("rank {} of {} divides other layers than rank 0; pass the same module with the "
               "same options on all ranks. Rank {}: {}",
               rank, group.world_size(), group.rank(), text));
  }
}

std::vector<std::string> names_of_axes(const DeviceMesh& mesh) {
  std::vector<std::string> names;
  for (const MeshAxis& axis : mesh.axes()) names.push_back(axis.name);
  return names;
}

std::shared_ptr<const parallel::ExpertGroups> groups_of(const DeviceMesh& mesh,
                                                        const std::string& axis) {
  const ProcessGroup& tokens = mesh.joint_group(names_of_axes(mesh));
  const ProcessGroup& experts = mesh.group(axis);
  std::vector<int> members;
  for (const int rank : experts.global_ranks()) members.push_back(tokens.group_rank(rank).value());
  return std::make_shared<const parallel::ExpertGroups>(
      parallel::ExpertGroups{.tokens = tokens, .experts = experts, .members = std::move(members)});
}

// divided: the parameters of experts, with the sizes of the whole ones.
std::vector<ParameterShard> records_of(
    const torch::nn::Module& module, const DeviceMesh& mesh, const std::string& expert_axis,
    const std::map<const c10::TensorImpl*, std::vector<int64_t>>& divided) {
  std::vector<ParameterShard> records;
  for (const NamedTensor& parameter : distinct_parameters(module)) {
    const auto sizes = divided.find(parameter.tensor.unsafeGetTensorImpl());
    const bool is_expert = sizes != divided.end();
    std::vector<Placement> placements;
    for (const MeshAxis& axis : mesh.axes()) {
      placements.push_back(is_expert && axis.name == expert_axis ? Placement(Shard(0))
                                                                 : Replicate());
    }
    records.push_back({.name = parameter.name,
                       .sizes = is_expert ? sizes->second : parameter.tensor.sizes().vec(),
                       .mesh = mesh,
                       .placements = std::move(placements),
                       .flat_axis = {},
                       .range = {.begin = 0, .end = parameter.tensor.numel()},
                       .values = parameter.tensor,
                       .parameter = parameter.tensor});
    if (is_expert && mesh.size(expert_axis) > 1) {
      keep_division(records.back());
    } else {
      records.back() = on_joint_mesh(records.back(), division_of(parameter).get());
    }
  }
  return records;
}

// A record has no axis along which nothing divides the parameter.
bool is_replicated_along(const MeshAxis& axis, const ParameterShard& shard) {
  const auto found = std::ranges::find(shard.mesh.axes(), axis);
  if (found == shard.mesh.axes().end()) return true;
  return shard.placements[static_cast<size_t>(found - shard.mesh.axes().begin())].is_replicate();
}

}  // namespace

ExpertParallel::ExpertParallel(torch::nn::Module& module, const DeviceMesh& mesh,
                               const ExpertParallelOptions& options)
    : mesh_(mesh) {
  const std::string& axis = options.expert_axis;
  const std::vector<NamedLayer> experts = layers_of(module);
  layers::check_on_all_ranks(mesh.joint_group(names_of_axes(mesh)), [&] {
    if (experts.empty()) {
      refuse_division(
          format("the module \"{}\" has no MixtureOfExperts, so there is nothing to divide along "
                 "\"{}\"",
                 module.name(), axis));
    }
    for (const NamedLayer& named : experts) check_layer(named, mesh, axis);
  });
  const std::shared_ptr<const parallel::ExpertGroups> groups = groups_of(mesh, axis);
  if (mesh.size() > 1) check_equal_on_all(text_of(experts, axis), groups->tokens);
  make_equal(module, groups->tokens, "ExpertParallel");
  std::map<const c10::TensorImpl*, std::vector<int64_t>> divided;
  for (const auto& [name, layer] : experts) {
    auto parameters = layer->named_parameters(/*recurse=*/false);
    for (const std::string& parameter : layer->names_of_expert_parameters()) {
      const at::Tensor& tensor = parameters[parameter];
      divided.emplace(tensor.unsafeGetTensorImpl(), tensor.sizes().vec());
    }
    layer->divide(groups, name);
  }
  shards_ = records_of(module, mesh, axis, divided);
}

at::Tensor ExpertParallel::mean_over_tokens(const at::Tensor& sum, int64_t count) const {
  return cadre::mean_over_tokens(sum, count, mesh_.joint_group(names_of_axes(mesh_)));
}

void ExpertParallel::sum_gradients(const SumGradientsOptions& options) const {
  sum_gradients(shards_, options);
}

void ExpertParallel::sum_gradients(std::span<const ParameterShard> shards,
                                   const SumGradientsOptions& options) const {
  for (const std::string& axis : options.reduced_axes) mesh_.size(axis);  // throws if unknown
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
