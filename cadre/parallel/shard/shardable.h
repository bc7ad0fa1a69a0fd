// Checks whether parameters can be divided into shards, and throws if not.
//
// Threads: any. Errors: kInvalidArgument, with the name of the parameter and the remedy.
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
  // Tensors on the meta device are allowed; the caller gives them values later.
  bool may_be_meta = false;
};

// Throws unless the parameters are distinct dense CPU leaves of dtype `rules.shard` that share no
// memory. Collectives must support both dtypes, and if they differ, no parameter may have a
// gradient. what: the beginning of the error text.
CADRE_EXPORT void check_shardable(const std::string& what,
                                  const std::vector<NamedTensor>& parameters,
                                  const ShardedDtypes& rules);

// Throws if a tensor of `moved` has an element in common with another tensor of `moved` or of
// `kept`. The caller is about to move `moved` to other memory, so a later change of one tensor
// would no longer change the other. Tensors on the meta device have elements in common if they
// overlap in the same storage.
CADRE_EXPORT void check_apart(const std::string& what, std::span<const NamedTensor> moved,
                              std::span<const NamedTensor> kept = {});

// Logs one warning if a tensor that is in neither list shares the storage of a tensor of `moved`,
// for example a view, a member made by detach() or the weight of another module. That tensor keeps
// the old memory, so later changes of one no longer change the other.
CADRE_EXPORT void warn_of_other_holders(LogSink& log, std::string_view component,
                                        std::span<const NamedTensor> moved,
                                        std::span<const NamedTensor> kept);

// Returns the reason for which the parameter has no values, as a main clause for an error text;
// nullopt if the parameter has values.
std::optional<std::string_view> reason_without_values(const at::Tensor& parameter);

}  // namespace cadre::shard
