// Divides the layers of a module among the ranks of a mesh axis, by a plan of name patterns.
//
//   cadre::parallelize_module(*model, mesh["tp"], {
//       {"blocks.*.attention.qkv", cadre::ParallelStyle::kColwise},
//       {"blocks.*.attention.output", cadre::ParallelStyle::kRowwise},
//       {"blocks.*.norm*", cadre::ParallelStyle::kSequence}});
//   torch::optim::AdamW optimizer(model->parameters());
//
// All ranks get the weights of rank 0, of which each keeps its parts: the initial values are those
// of the plain module. Parameters keep their names, and are the same tensors. The reductions of
// gradients are in the backward, so an optimizer needs nothing special; the global norm is
// clip_grad_norm_(records, max_norm) of shard/sharded_norm.h. On an axis of one rank every layer
// stays the plain one.
//
// Between a column-parallel layer and a row-parallel one each rank has a part of the features. A
// parameter of your own there, for example that of a PReLU, gets on each rank only the gradient of
// the rank's part, without an error, because parallelize_module() does not know where a module
// lies. Pass it through functional::copy_to_group(parameter, group), whose backward sums over the
// ranks.
//
// With a kSequence entry, activations between blocks are shards of the sequence: column-parallel
// layers gather them, row-parallel ones and divided embeddings reduce-scatter. Every layer with
// parameters, and every one of Cadre's layers, must then be in the plan, because a layer on shards
// that does not sum its gradients would train wrongly, and a dropout would repeat one mask on all
// ranks; name those that see whole sequences kReplicated.
//
// Threads: as the module. Blocking: collective, until the group's deadline. Lifetime: the layers
// and the records keep the group or mesh. Errors: kInvalidArgument for a mesh of several axes, a
// pattern that matches no module, a module that two entries match, a layer that has no such style
// or option, a module that is parallelized already or has gradients, a divided parameter that is
// also one of a module that is no layer of Cadre's, ranks whose modules or plans differ. What one
// rank refuses, all ranks throw, and the group stays usable. A module is unchanged after an error.
// What only a forward shows, such as a column-parallel output before a layer that is not
// row-parallel, is refused there (layers/tensor_parallel_layer.h).
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

// ranks: a mesh of one axis; or a ProcessGroup, which counts as a mesh with the axis "tp". Returns
// a ParameterShard for each parameter, in the order of named_parameters(), each tensor once:
// `values` and `parameter` are the module's own tensor, of the sizes of the local box.
CADRE_EXPORT std::vector<ParameterShard> parallelize_module(torch::nn::Module& module,
                                                            const Ranks& ranks,
                                                            const std::vector<PlanEntry>& plan);

// Returns the entries of all modules in the module that have a plan of their own (PlannedModule),
// such as each SelfAttention and TransformerBlock, with their names in the module. Layers outside
// of them need entries of the program's own; a plan is a list, to which they are added.
CADRE_EXPORT std::vector<PlanEntry> tensor_parallel_plan(
    const torch::nn::Module& module, const TensorParallelPlanOptions& options = {});

}  // namespace cadre
