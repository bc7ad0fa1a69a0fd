// Divides the layers of a module among the ranks of a mesh axis, by a plan of name patterns.
//
//   cadre::parallelize_module(*model, mesh["tp"], {
//       {"blocks.*.attention.qkv", cadre::ParallelStyle::kColwise},
//       {"blocks.*.attention.output", cadre::ParallelStyle::kRowwise},
//       {"blocks.*.norm*", cadre::ParallelStyle::kSequence}});
//   torch::optim::AdamW optimizer(model->parameters());
//
// All ranks receive the weights of rank 0, and each rank keeps its parts of them, so the initial
// values are those of the undivided module. Parameters keep their names and remain the same
// tensors. The backward reduces the gradients, so an optimizer needs nothing special. The global
// norm of the gradients is clip_grad_norm_(records, max_norm) of shard/sharded_norm.h, where
// `records` is the result of parallelize_module(). On an axis of one rank no layer changes.
//
// Between a column-parallel layer and a row-parallel one each rank has a part of the features. If
// the program has a parameter there, such as that of a PReLU, its gradient on each rank covers only
// the rank's features. parallelize_module() cannot detect this, so there is no error. Pass such a
// parameter through functional::copy_to_group(parameter, group), whose backward sums over the
// ranks.
//
// If the plan has a kSequence entry, activations between blocks are shards of the sequence:
// column-parallel layers gather them, row-parallel layers and divided embeddings reduce-scatter
// them. Then every layer with parameters, and every layer of Cadre, must be in the plan. Otherwise
// a layer would get shards without summing its gradients over the ranks, and a dropout would use
// the same mask on all ranks. Name layers that get whole sequences kReplicated.
//
// Threads: as the module. Blocking: collective, until the group's deadline. Lifetime: the layers
// and the returned ParameterShards keep the group or mesh alive. Errors: kInvalidArgument for a
// mesh of several axes, a pattern that matches no module, a module that two entries match, a layer
// that does not support the style or option, a module that is parallelized already or has
// gradients, a divided parameter that a module other than a layer of Cadre also has, and ranks
// whose modules or plans differ. If one rank finds such an error, all ranks throw it, the group
// stays usable, and the module is unchanged. Errors that only a forward can detect, such as a
// column-parallel output before a layer that is not row-parallel, are thrown by the forward
// (layers/tensor_parallel_layer.h).
// Source: torch.distributed.tensor.parallel.parallelize_module.
#pragma once

#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/layers/tensor_parallel_layer.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/mesh/ranks.h"

namespace torch::nn {
class Module;
}

namespace cadre {

// `ranks` is a mesh of one axis, or a ProcessGroup, which counts as a mesh with the axis "tp".
// Returns a ParameterShard for each parameter, in the order of named_parameters(); a tensor with
// two names is listed once. Its `values` and `parameter` are the module's own tensor, which has the
// sizes of this rank's part.
CADRE_EXPORT std::vector<ParameterShard> parallelize_module(torch::nn::Module& module,
                                                            const Ranks& ranks,
                                                            const std::vector<PlanEntry>& plan);

// Collects the plans of all submodules that know their own plan (PlannedModule), such as each
// SelfAttention and TransformerBlock, and returns their entries with the names that the layers have
// in `module`. The program must add entries for layers outside of such submodules.
CADRE_EXPORT std::vector<PlanEntry> tensor_parallel_plan(
    const torch::nn::Module& module, const TensorParallelPlanOptions& options = {});

}  // namespace cadre
