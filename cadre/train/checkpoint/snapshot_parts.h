// The contents of a sharded snapshot: for each rank, the boxes (rectangular parts) that it holds of
// each tensor.
//
// Threads: plain values. Lifetime: shares the tensors. Errors: none. Tensors are dense, on any
// device but meta, and of a dtype of safetensors. Saving reads them, loading fills them in place,
// on the stream that is current. A snapshot does not say on which device a tensor was.
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

// A tensor of which this rank holds all elements, some boxes, or none. A snapshot needs only the
// boxes; so this type also describes tensors that are not on a mesh: buffers, parameters of a plain
// module, tensors of the program. A ParameterShard additionally says how the ranks divide a
// parameter, by a mesh and placements, which norms and optimizers need; part_of() converts it to a
// SnapshotTensor.
struct SnapshotTensor {
  std::string name;
  std::vector<int64_t> sizes;  // the sizes of the whole tensor
  std::vector<Box> boxes;      // disjoint; empty if this rank holds no elements
  at::Tensor values;           // the elements of the boxes, row-major, one box after the other
  // The memory of a wrapper in which `values` lie. A load changes `values` through this object, so
  // that the wrapper notices the change.
  ShardMemory memory = {};
  // If true, another entry of the same name, on this rank or another one, has the same elements,
  // perhaps in other boxes. A save skips this entry; a load fills it.
  bool is_copy = false;
};

struct SnapshotParts {
  std::vector<SnapshotTensor> parameters;
  // Buffers are whole on every rank; a save writes those of rank 0.
  std::vector<SnapshotTensor> buffers;
  // Each state is divided among the ranks like the `values` of its parameter.
  std::vector<ParameterState> optimizer;
  std::string extra = "{}";  // a JSON object of the program; a save writes that of rank 0
};

// Maps (name, ParameterState::entry) to the tensor.
using SnapshotEntries = std::map<std::pair<std::string, size_t>, const SnapshotTensor*>;
SnapshotEntries entries_of(std::span<const SnapshotTensor> parameters);
// Returns the parts that a save writes: without the entries that are copies, and without their
// states.
SnapshotParts without_copies(const SnapshotParts& parts);

// Returns a view of the elements of the box `part`. `tensor` has the elements and the sizes of
// `box`, which contains `part`.
at::Tensor slice_of(at::Tensor tensor, const Box& box, const Box& part);

CADRE_EXPORT SnapshotTensor whole_tensor(std::string name, const at::Tensor& tensor);
CADRE_EXPORT SnapshotTensor part_of(const ParameterShard& shard);

// Returns the parts of a plain module: each tensor once, under the first of its names. `optimizer`
// and `extra` stay empty. Throws kInvalidArgument for a parameter that is a shard, as after
// parallelize_module(). The overload with ParameterShards and a module throws it for a shard that
// has no ParameterShard.
CADRE_EXPORT SnapshotParts parts_of(const torch::nn::Module& module);
// Returns the parts of a model of which the ParameterShards describe every parameter, without
// buffers. Use it for a pipeline, whose ranks have different modules.
CADRE_EXPORT SnapshotParts parts_of(std::span<const ParameterShard> shards);
// Returns the parts of a wrapped model: this rank's shards of the parameters, and as whole tensors
// its buffers and the parameters that the wrapper does not shard (frozen or ignored ones).
CADRE_EXPORT SnapshotParts parts_of(std::span<const ParameterShard> shards,
                                    const torch::nn::Module& module);

}  // namespace cadre
