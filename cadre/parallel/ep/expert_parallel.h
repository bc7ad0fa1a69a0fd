// Divides the experts of a module's mixture-of-experts layers among the ranks of a mesh axis; the
// other parameters stay whole on every rank. Every rank has tokens of its own.
//
//   cadre::DeviceMesh mesh(world, {{"dp", 2}, {"ep", 4}});
//   const cadre::ExpertParallel experts(*model, mesh);     // rank 0's weights; a quarter each
//   torch::optim::AdamW optimizer(model->parameters());
//   ...
//   experts.mean_over_tokens(sum_of_losses, num_tokens).backward();
//   experts.sum_gradients();
//   cadre::clip_grad_norm_(experts, 1.0);
//   optimizer.step();
//
// The axes of the mesh are those whose ranks have different tokens. Along the expert axis ("ep")
// each rank has its part of the experts; along the other axes ranks have the same experts.
// Parameters keep their names and remain the same tensors, but those of experts have fewer rows,
// one for each expert of this rank. Router losses, statistics and capacities are computed over the
// tokens of all ranks of the mesh, in rank order.
//
// Threads: as the module. Blocking: the constructor, mean_over_tokens() and sum_gradients() are
// collective, until the deadline of their groups. Lifetime: a value; keeps the mesh and shares the
// parameters.
// Errors: cadre::Error. kInvalidArgument if the number of ranks along the axis does not divide the
// number of experts, if the module has no mixture-of-experts layer, if a layer is divided already
// or has gradients, or if layers differ between ranks. If one rank finds such an error, all ranks
// throw it, and the module is unchanged.
// Source: GShard, https://arxiv.org/abs/2006.16668. docs/decisions/0019-expert-parallel.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/ranks.h"

namespace torch::nn {
class Module;
}

namespace cadre {

struct ExpertParallelOptions {
  std::string expert_axis = "ep";
};

struct SumGradientsOptions {
  // The axes along which another object reduces the gradients, for example a
  // DistributedDataParallel on the group of that axis. sum_gradients() does not sum along these
  // axes.
  std::vector<std::string> reduced_axes = {};
};

class CADRE_EXPORT ExpertParallel {
 public:
  // `ranks` is a mesh, or a ProcessGroup, which counts as a mesh whose only axis is the expert
  // axis.
  ExpertParallel(torch::nn::Module& module, const Ranks& ranks,
                 const ExpertParallelOptions& options = {});

  // Returns a ParameterShard for each parameter, in the order of named_parameters(); a tensor with
  // two names is listed once. Its `values` and `parameter` are the module's own tensor. Along the
  // expert axis the placement is Shard(0) for parameters of experts and Replicate() for others.
  // Norms, snapshots and optimizers use these ParameterShards.
  std::vector<ParameterShard> parameter_shards() const { return shards_; }

  // `sum` is this rank's sum of losses over `count` tokens. Returns the sum over all ranks divided
  // by the number of tokens of all ranks: shape (), equal on all ranks, NaN if no rank has a token.
  // The backward on each rank computes the gradient from the rank's own tokens only, so call
  // sum_gradients() after it.
  at::Tensor mean_over_tokens(const at::Tensor& sum, int64_t count) const;
  // Sums the gradient of each parameter over the ranks that have the same elements of it: for an
  // expert over all axes except the expert axis, for other parameters over all axes. If this rank
  // has no gradient of a parameter but another rank has one, this rank counts as zeros; if no rank
  // has one, none is created, as in one process. Call it once for each step, after the last
  // backward: a second call adds the sums again.
  void sum_gradients(const SumGradientsOptions& options = {}) const;
  // Does the same if a wrapper such as FullyShardedDataParallel shards the parameters that this
  // class has left on each rank: sums the gradients in the wrapper's ParameterShards. reduced_axes
  // names the axes along which the wrapper reduces.
  //   experts.sum_gradients(model.parameter_shards(), {.reduced_axes = {"dp_shard"}});
  void sum_gradients(std::span<const ParameterShard> shards,
                     const SumGradientsOptions& options) const;

 private:
  DeviceMesh mesh_;
  std::vector<ParameterShard> shards_;
};

}  // namespace cadre
