// Translates a collective to calls of NCCL.
//
// Threads: pure functions. Errors: none. Source: the documentation of NCCL, "Point-to-point
// communication"; c10d expresses gather, scatter and all_to_all in the same way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cadre/core/base/types.h"
#include "cadre/core/collective/backend.h"
#include "cadre/core/collective/collective.h"
#include "cadre/tensor/backends/nccl/nccl_api.h"

namespace cadre::nccl {

struct NcclCall {
  enum class Kind : uint8_t {
    kAllReduce,
    kBroadcast,
    kReduce,
    kAllGather,
    kReduceScatter,
    kSend,
    kRecv
  };
  Kind kind = Kind::kAllReduce;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  size_t count = 0;
  DataType type = DataType::kInt8;
  int rank = 0;  // the root or the peer
};

// Returns the calls, which belong into one group of NCCL. Data that is not reduced moves as bytes.
// Parts of no elements are left out, on the sender and on the receiver. REQUIRES: validate() has
// succeeded, and NCCL supports the reduction.
std::vector<NcclCall> calls_of(const Collective& collective, Rank self, int world_size);

// Returns the type in which NCCL reduces the dtype. A bool is a uint8. REQUIRES: not kInt16.
DataType reduced_type(DType dtype);
// Returns the operation by which NCCL reduces the dtype; kSum for kPremulSum. On bools, whose bytes
// are 0 or 1, a logical or is a maximum and a logical and is a minimum.
RedOp reduction_of(DType dtype, ReduceOp op);

// Returns what the engine computes of the reductions of reduction_table.h.
EnumSet<ReduceOp> nccl_reductions(DType dtype);

}  // namespace cadre::nccl
