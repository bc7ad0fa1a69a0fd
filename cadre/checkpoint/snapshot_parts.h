// What a sharded snapshot is made of: on each rank the boxes that it holds of each tensor.
//
// Threads: plain values. Blocking: never. Lifetime: shares the tensors. Errors: none.
// Tensors: dense, CPU, a dtype of safetensors. Saving reads them, loading fills them in place.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cadre/base/export.h"
#include "cadre/checkpoint/safetensors.h"
#include "cadre/mesh/placement.h"
#include "cadre/shard/parameter_shard.h"

namespace torch::nn {
class Module;
}

namespace cadre {

// A tensor, of which this rank holds some boxes, all of it, or nothing.
struct SnapshotTensor {
  std::string name;
  std::vector<int64_t> sizes;  // of the whole tensor
  std::vector<Box> boxes;      // disjoint; none where this rank holds nothing
  at::Tensor values;           // the elements of the boxes, row-major, one box after the other
  // What a load holds while it writes `values`; see ParameterShard. Null: nothing.
  std::shared_ptr<ShardFence> fence = {};
  // See ParameterShard; loading gathers what it has changed.
  std::shared_ptr<FlatParameters> flat = {};
};

// The state of an optimizer for one parameter. Tensors have as many elements as the parameter's
// `values`, and lie on the ranks as they do; scalars are 0-dim and equal on all ranks.
struct ParameterState {
  std::string parameter;
  NamedTensors tensors;
  NamedTensors scalars;
};

struct SnapshotParts {
  std::vector<SnapshotTensor> parameters;
  std::vector<SnapshotTensor> buffers;  // whole on every rank; rank 0's are written
  std::vector<ParameterState> optimizer;
  std::string extra = "{}";  // a JSON object of the caller; rank 0's is written
};

CADRE_EXPORT SnapshotTensor whole_tensor(std::string name, const at::Tensor& tensor);
CADRE_EXPORT SnapshotTensor part_of(const ParameterShard& shard);

// Of a plain module: each tensor once, under the first of its names. `optimizer` and `extra` are
// left empty.
CADRE_EXPORT SnapshotParts parts_of(const torch::nn::Module& module);
// Of a wrapped model: what the rank owns of the parameters, and, whole, the parameters of the
// module that are in no shard (frozen or ignored ones of some wrappers), and its buffers.
CADRE_EXPORT SnapshotParts parts_of(std::span<const ParameterShard> shards,
                                    const torch::nn::Module& module);

}  // namespace cadre
