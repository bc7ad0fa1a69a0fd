// Throws for parameters that cannot be cut into shards.
//
// Threads: any. Blocking: never. Lifetime: keeps nothing.
// Errors: kInvalidArgument, with the parameter and the remedy.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/log.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::shard {

struct ShardedDtypes {
  at::ScalarType shard;
  at::ScalarType compute;
  bool may_be_meta = false;  // the caller gives tensors on the meta device their values later
};

// Throws unless the parameters are distinct dense CPU leaves of the shards' dtype that share no
// memory. They must have no gradients if the computation has another dtype, and groups must be able
// to move both dtypes. what: the text with which messages begin.
CADRE_EXPORT void check_shardable(const std::string& what,
                                  const std::vector<NamedTensor>& parameters,
                                  const ShardedDtypes& rules);

// Throws if a tensor of `moved` shares memory with another one of `moved` or with one of `kept`:
// the values of `moved` get other memory, so the sharing would end silently. Tensors on the meta
// device are compared by their storages. Tensors without elements in common share nothing.
CADRE_EXPORT void check_apart(const std::string& what, std::span<const NamedTensor> moved,
                              std::span<const NamedTensor> kept = {});

// Logs one warning if another tensor, which is in neither list, shares the memory of a tensor of
// `moved`: a member made by detach(), a view, the weight of another module. It keeps the earlier
// memory, and later changes of one no longer show in the other.
CADRE_EXPORT void warn_of_other_holders(LogSink& log, std::string_view component,
                                        std::span<const NamedTensor> moved,
                                        std::span<const NamedTensor> kept);

// Returns why the parameter has no values, as the end of a sentence; nullopt if it has values.
std::optional<std::string_view> reason_without_values(const at::Tensor& parameter);

}  // namespace cadre::shard
