// One collective of one rank as a value: what it computes, and on which memory.
//
//   std::array<int64_t, 2> sum{1, 2};
//   const cadre::Bytes bytes = std::as_writable_bytes(std::span(sum));
//   cadre::Collective collective =
//       cadre::Collective::all_reduce(bytes, bytes, cadre::DType::kInt64, cadre::ReduceOp::kSum);
//   group.run(collective, {});  // group: a Communicator; issue() runs it in the background
//
// Declares:
// - `Collective`, `validate()`: the arguments of a collective, and their check.
// - `Reduction`: a ReduceOp, or the sum of inputs that each rank multiplies by a factor.
// - `SplitCounts`, `PartSizes`, `part_sizes()`: the sizes of the parts of an all_to_all, in
//   elements and in bytes.
// - `reduces()`: whether a kind of operation combines the inputs of the ranks.
// - `OpDescriptor`, `describe_operation()`: the properties of an operation that ranks compare, and
//   their text.
// - `OpContext`, `OpProgress`, `ProgressMirror`: what an engine is told about an operation, and
//   what it reports of its progress.
// - `PackedShape`: the sizes of a tensor in 64 bits, which ranks compare, too.
//
// Guide: docs/guide/reference/groups-and-messages.md. Source: the arguments of c10d::Backend, and
// of NCCL's calls.
#pragma once

#include "cadre/core/collective/collective.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/collective/packed_shape.h"
