// Gathers whole tensors from the shards of all ranks, as copies to read: the state of the wrapper
// does not change. Also returns the values of parameters that every rank has whole, without a copy.
// Blocking: functions that gather are collectives along the mesh axes that divide the parameter.
// Lifetime: keeps nothing; whole_values() shares the parameter's memory. Errors: those of the
// group.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::shard {

// Returns the whole tensor as a copy, of shard.sizes, on all ranks; each element has the bits that
// its owner has. part: this rank's elements of the parameter's values, of its gradient or of an
// optimizer state, as many as shard.range has, of any dtype.
CADRE_EXPORT at::Tensor gather_whole(const ParameterShard& shard, const at::Tensor& part);

// Return the whole values, or the whole gradients, of all parameters. A gradient is undefined if no
// rank of `world` has one; if only some ranks have one, the elements of the others are zeros.
// `world` is the group of the shards' mesh.
CADRE_EXPORT std::vector<NamedTensor> gather_values(std::span<const ParameterShard> shards);
CADRE_EXPORT std::vector<NamedTensor> gather_gradients(std::span<const ParameterShard> shards,
                                                       const ProcessGroup& world);

// Throws kInvalidArgument on all ranks if on any rank a gradient is not reduced to the shards yet,
// for example after a backward() under no_sync(): the gradients of the shards would be read as
// zeros. call: the name of the called function for the error, as static text. Collective along the
// axes that divide the parameters, and over the ranks of each wrapper.
CADRE_EXPORT void check_gradients_reduced(const char* call, std::span<const ParameterShard> shards);

// Returns a view of the parameter's values, flattened if the parameter is contiguous. It is never a
// copy, as reshape() would make of a channels-last weight, because a snapshot would then be loaded
// into the copy.
CADRE_EXPORT at::Tensor whole_values(const at::Tensor& parameter);

// Lets `values` of each ParameterShard outside of FlatParameters share the current memory of its
// parameter again, if set_data() has given the parameter other memory. The tensors `values` stay
// the same objects, because optimizers find their states by them.
CADRE_EXPORT void follow_memory(std::span<const ParameterShard> shards);

}  // namespace cadre::shard
