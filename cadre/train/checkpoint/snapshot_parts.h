// The contents of a sharded snapshot: for each rank, the boxes that it holds of each tensor.
//
// Threads: plain values. Blocking: never. Lifetime: shares the tensors. Errors: none.
// Tensors: dense, CPU, a dtype of safetensors. Saving reads them, loading fills them in place.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/mesh/placement.h"
#include "cadre/tensor/optim/parameter_state.h"
#include "cadre/train/checkpoint/module_file.h"

namespace torch::nn {
class Module;
}

namespace cadre {

// A tensor of which this rank holds some boxes, all of it, or nothing. A ParameterShard also says
// how the ranks divide the tensor, by a mesh and placements, which norms and optimizers need. A
// snapshot needs only the boxes, and has tensors without a mesh, too: buffers, parameters of a
// plain module, tensors of the program. part_of() makes a SnapshotTensor of a ParameterShard.
struct SnapshotTensor {
  std::string name;
  std::vector<int64_t> sizes;  // the sizes of the whole tensor
  std::vector<Box> boxes;      // the boxes are disjoint; empty if this rank holds nothing
  at::Tensor values;           // the elements of the boxes, row-major, one box after the other
  // The memory of a wrapper in which `values` lie; a load writes them in an update of it.
  ShardMemory memory = {};
  // If true, another entry of the same name, on this rank or another one, has these elements,
  // perhaps in other boxes. Saves leave this entry out; loads fill it.
  bool is_copy = false;
};

struct SnapshotParts {
  std::vector<SnapshotTensor> parameters;
  // The buffers are whole on every rank; those of rank 0 are written.
  std::vector<SnapshotTensor> buffers;
  // The states are sharded as the `values` of the parameters.
  std::vector<ParameterState> optimizer;
  std::string extra = "{}";  // a JSON object of the program; that of rank 0 is written
};

// Maps name and ParameterState::entry to the tensor.
using SnapshotEntries = std::map<std::pair<std::string, size_t>, const SnapshotTensor*>;
SnapshotEntries entries_of(std::span<const SnapshotTensor> parameters);
// Returns the parts that a save writes: those without copies, and the states of copies.
SnapshotParts without_copies(const SnapshotParts& parts);

// `tensor` has the elements of `box`, with its sizes. Returns a view of the elements of `part`,
// which lies in `box`.
at::Tensor slice_of(at::Tensor tensor, const Box& box, const Box& part);

CADRE_EXPORT SnapshotTensor whole_tensor(std::string name, const at::Tensor& tensor);
CADRE_EXPORT SnapshotTensor part_of(const ParameterShard& shard);

// Returns the parts of a plain module: each tensor once, under the first of its names. `optimizer`
// and `extra` stay empty. Throws kInvalidArgument for a parameter that is a shard, as after
// parallelize_module(); the form with ParameterShards and a module throws it for a shard without a
// ParameterShard.
CADRE_EXPORT SnapshotParts parts_of(const torch::nn::Module& module);
// Returns the parts of a model that the ParameterShards describe as a whole, without buffers. Used
// for a pipeline, whose ranks have different modules.
CADRE_EXPORT SnapshotParts parts_of(std::span<const ParameterShard> shards);
// Returns the parts of a wrapped model: the rank's shards of the parameters, and, as whole tensors,
// parameters that are not sharded (frozen or ignored ones of some wrappers) and buffers.
CADRE_EXPORT SnapshotParts parts_of(std::span<const ParameterShard> shards,
                                    const torch::nn::Module& module);

}  // namespace cadre
