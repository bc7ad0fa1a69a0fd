// Refuses parameters that cannot be cut into shards.
//
// Threads: any. Blocking: never. Lifetime: keeps nothing.
// Errors: kInvalidArgument, with the parameter and the remedy.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/wrap/named_tensors.h"

namespace cadre::shard {

struct ShardedDtypes {
  at::ScalarType shard;
  at::ScalarType compute;
};

// Throws unless the parameters are distinct dense CPU leaves of dtypes.shard which share no memory,
// and without gradients where dtypes.compute is another one, and a group moves both dtypes.
// what: how messages begin.
void check_shardable(const std::string& what, const std::vector<NamedTensor>& parameters,
                     const ShardedDtypes& dtypes);

// Why the memory of a parameter is not there, as the end of a sentence; nullopt if it is there.
std::optional<std::string_view> reason_without_values(const at::Tensor& parameter);

}  // namespace cadre::shard
