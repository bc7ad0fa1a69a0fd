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
// The axes of the mesh are those whose ranks have different tokens. Along the axis of the experts
// each rank has its part of the experts; along the other axes ranks have the same experts.
// Parameters keep their names, and are the same tensors with fewer experts. Routers, auxiliary
// losses and capacities see the tokens of all ranks of the mesh, in rank order.
//
// Threads: as the module. Blocking: the constructor and the calls below but parameter_shards() are
// collective, until the deadline of their groups. Lifetime: a value; keeps the mesh and shares the
// parameters.
// Errors: cadre::Error, kInvalidArgument, on all ranks also if one rank refuses, and a module that
// is unchanged, for an axis that does not divide the number of experts, a module without such
// layers, one that is divided already or has gradients, and for layers that differ between ranks.
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
  // Axes along which another object reduces the gradients, as DistributedDataParallel on the group
  // of an axis does.
  std::vector<std::string> reduced_axes = {};
};

class CADRE_EXPORT ExpertParallel {
 public:
  // ranks: a mesh; or a ProcessGroup, which counts as a mesh whose only axis is that of the
  // experts.
  ExpertParallel(torch::nn::Module& module, const Ranks& ranks,
                 const ExpertParallelOptions& options = {});

  // Returns a ParameterShard for each parameter, in the order of named_parameters(), each tensor
  // once: `values` and `parameter` are the module's own tensor. The placements are Shard(0) for
  // experts along their axis, else Replicate(). Norms, snapshots and optimizers read them.
  std::vector<ParameterShard> parameter_shards() const { return shards_; }

  // Returns the sum over all ranks of `sum` (this rank's sum of losses over `count` tokens),
  // divided by the number of all tokens: (), equal on all ranks; NaN without any token. On each
  // rank its gradient is that of the rank's own tokens, so call sum_gradients() after its backward.
  at::Tensor mean_over_tokens(const at::Tensor& sum, int64_t count) const;
  // Sums the gradient of each parameter over the ranks that have the same elements of it: the
  // gradient of an expert over the axes other than that of the experts, of another parameter over
  // all axes. A parameter without a gradient on this rank counts as zeros, and stays without one if
  // none of these ranks has one, as in one process. Call it once for each step, after the last
  // backward: a second call adds the sums again.
  void sum_gradients(const SumGradientsOptions& options = {}) const;
  // Does the same for a wrapper that shards the parameters which this class has left on each rank:
  // sums the gradients in the wrapper's ParameterShards. reduced_axes: the axes along which the
  // wrapper reduces.
  //   experts.sum_gradients(model.parameter_shards(), {.reduced_axes = {"dp_shard"}});
  void sum_gradients(std::span<const ParameterShard> shards,
                     const SumGradientsOptions& options) const;

 private:
  DeviceMesh mesh_;
  std::vector<ParameterShard> shards_;
};

}  // namespace cadre
