// Assembles whole tensors from the parts that the ranks own, for reading, without the wrapper and
// without a change to its state. Also gives the values of parameters that every rank has whole, in
// place.
// Threads: one. Blocking: what gathers is collective along the axes that divide the parameter.
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

// part: this rank's part of the values, of the gradient or of an optimizer state: as many elements
// as shard.range, of any dtype. Returns a new tensor of shard.sizes with the bits of the owners, on
// all ranks.
CADRE_EXPORT at::Tensor gather_whole(const ParameterShard& shard, const at::Tensor& part);

// These functions return the values of all shards, and their gradients. A gradient is undefined if
// no rank of `world` has one; else a rank without one counts as zeros. The shards lie on a mesh of
// `world`.
CADRE_EXPORT std::vector<NamedTensor> gather_values(std::span<const ParameterShard> shards);
CADRE_EXPORT std::vector<NamedTensor> gather_gradients(std::span<const ParameterShard> shards,
                                                       const ProcessGroup& world);

// Throws kInvalidArgument on all ranks if a gradient of any rank waits for its reduction to the
// shards, after a backward() under no_sync() for example: the caller would read zeros from the
// gradients of the shards. call: the name of the program's call in the error; static text.
// Collective along the axes that divide the parameters, and over the ranks of each wrapper.
CADRE_EXPORT void check_gradients_reduced(const char* call, std::span<const ParameterShard> shards);

// Returns a view of the values, of one dimension if the parameter is contiguous. Never returns a
// copy, which reshape() would make of a channels-last weight: the copy would be saved and loaded in
// place of the parameter.
CADRE_EXPORT at::Tensor whole_values(const at::Tensor& parameter);

// Gives `values` of each ParameterShard without FlatParameters the memory that its parameter has
// now, if set_data() has replaced it. The tensors stay the same objects, by which optimizers find
// their states.
CADRE_EXPORT void follow_memory(std::span<const ParameterShard> shards);

}  // namespace cadre::shard
