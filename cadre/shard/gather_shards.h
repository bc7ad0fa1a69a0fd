// Whole tensors from what each rank owns of them, for reading: without the wrapper, and without a
// change to its state.
//
// Threads: one. Blocking: collective along the axes that divide the parameter. Lifetime: keeps
// nothing. Errors: those of the group.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "cadre/base/export.h"
#include "cadre/group/process_group.h"
#include "cadre/shard/parameter_shard.h"
#include "cadre/wrap/named_tensors.h"

namespace cadre::shard {

// part: as many elements as shard.range, its values, gradient or optimizer state, of any dtype.
// Returns a new tensor of shard.sizes with the bits of the owners, on all ranks.
CADRE_EXPORT at::Tensor gather_whole(const ParameterShard& shard, const at::Tensor& part);

// The values of all shards, and their gradients: undefined where no rank of `world` has one; a rank
// without one counts as zeros. The shards lie on a mesh of `world`.
CADRE_EXPORT std::vector<NamedTensor> gather_values(std::span<const ParameterShard> shards);
CADRE_EXPORT std::vector<NamedTensor> gather_gradients(std::span<const ParameterShard> shards,
                                                       const ProcessGroup& world);

}  // namespace cadre::shard
