// Reduces gradients for the tests of ZeroRedundancyOptimizer, without DistributedDataParallel: by
// one all_reduce for each parameter (ZeRO stage 1), or to the ranks that own the shards (stage 2).
//
// Threads: one for each rank. Blocking: collective. For tests only.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/hooks/replica_check.h"

namespace cadre::testing {

// Replaces this rank's gradients, in place, by the sum over the ranks of gradient times `weight`.
inline void reduce_gradients(const torch::nn::Module& module, const ProcessGroup& group,
                             double weight) {
  for (const NamedTensor& parameter : distinct_parameters(module)) {
    if (!parameter.tensor.grad().defined()) continue;
    const torch::Tensor gradient = (parameter.tensor.grad() * weight).contiguous();
    group.all_reduce(gradient);
    torch::Tensor(parameter.tensor).mutable_grad() = gradient;
  }
}

// A minimal wrapper for ZeRO stage 2. Its parameters are in two flat buffers. After reduce() each
// rank has only the gradients of its shards.
class ShardedGradientsModel {
 public:
  ShardedGradientsModel(std::shared_ptr<torch::nn::Module> module, const ProcessGroup& group)
      : module_(std::move(module)), group_(group), mesh_(group, {{"shard", group.world_size()}}) {
    const std::vector<NamedTensor> parameters = distinct_parameters(*module_);
    wrap::broadcast_tensors(parameters, 0, group);
    std::vector<NamedTensor> trained;
    for (const NamedTensor& parameter : parameters) {
      if (parameter.tensor.requires_grad()) trained.push_back(parameter);
    }
    const auto middle = trained.begin() + static_cast<int64_t>(trained.size() / 2);
    for (const auto& part : {std::vector<NamedTensor>(trained.begin(), middle),
                             std::vector<NamedTensor>(middle, trained.end())}) {
      if (part.empty()) continue;
      flat_.push_back(std::make_shared<shard::FlatParameters>(
          part, group, shard::FlatParametersOptions{.keep_full = true}));
    }
  }

  torch::nn::Module* operator->() const { return module_.get(); }
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  const ProcessGroup& process_group() const { return group_; }
  const std::vector<std::shared_ptr<shard::FlatParameters>>& flat_parameters() const {
    return flat_;
  }
  std::vector<ParameterShard> parameter_shards() const {
    std::vector<ParameterShard> shards;
    for (const auto& flat : flat_) {
      for (ParameterShard& shard : flat->parameter_shards(mesh_, "shard")) shards.push_back(shard);
    }
    for (const NamedTensor& parameter : distinct_parameters(*module_)) {
      if (parameter.tensor.requires_grad()) continue;
      shards.push_back({.name = parameter.name,
                        .sizes = parameter.tensor.sizes().vec(),
                        .mesh = mesh_,
                        .placements = {Replicate()},
                        .flat_axis = std::nullopt,
                        .range = {.begin = 0, .end = parameter.tensor.numel()},
                        .values = parameter.tensor.detach().view(-1),
                        .parameter = parameter.tensor});
    }
    return shards;
  }
  // Waits until the all_gathers of the updated parameters have ended, as the forward of a real
  // wrapper does.
  void before_forward() {
    for (const auto& flat : flat_) flat->wait_unsharded();
  }
  void reduce(double weight) {
    for (const auto& flat : flat_) {
      for (size_t i = 0; i < flat->parameters().size(); ++i) {
        torch::Tensor parameter = flat->parameters()[i].tensor;
        if (!parameter.grad().defined()) continue;
        const torch::Tensor gradient = (parameter.grad() * weight).contiguous();
        group_.all_reduce(gradient);
        const FlatRange range = flat->layout().range(i, group_.rank());
        torch::Tensor leaf = flat->values(i);
        leaf.mutable_grad() = gradient.view(-1).slice(0, range.begin, range.end).clone();
        parameter.mutable_grad().reset();
      }
    }
  }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  ProcessGroup group_;
  DeviceMesh mesh_;
  std::vector<std::shared_ptr<shard::FlatParameters>> flat_;
};

}  // namespace cadre::testing
