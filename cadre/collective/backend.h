// The interface of every engine that moves and reduces bytes for a group.
//
// Threads: one operation at a time, from whichever thread holds the group's progress role.
// Blocking: every operation, until done, its deadline or the group's Interrupt.
// Lifetime: buffers are borrowed until the call returns.
// Errors: kTimeout and kPeerLost with OpProgress::waiting_for naming the peer; kAborted when the
// Interrupt was raised; kInvalidArgument when a peer called another operation
// (OpProgress::set_mismatch). After an error the group is unusable; buffers hold anything.
// Numerics: the order of additions is fixed by (op, dtype, count, world size), never by arrival;
// all ranks end with identical bits. bfloat16 is accumulated in float32 and rounded once. Source:
// the operations are c10d's, with one flat buffer a side.
#pragma once

#include <string>
#include <string_view>

#include "cadre/base/error.h"
#include "cadre/base/types.h"
#include "cadre/collective/op.h"

namespace cadre {

// What a backend can do, to be asked before use; nothing throws "not supported" half-way.
struct Capabilities {
  std::string_view name;       // "host" or "net"
  bool shares_memory = false;  // reads peers' symmetric buffers in place
  std::string algorithms;      // by size, for the log's first line
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual Capabilities capabilities() const = 0;

  // The root's data everywhere.
  virtual Status broadcast(const OpContext& op, Bytes data, Rank root) = 0;
  // out[i] = reduce over ranks of in[i]. `in` and `out` have equal sizes; they may be the same.
  virtual Status all_reduce(const OpContext& op, ConstBytes in, Bytes out, DType dtype,
                            ReduceOp reduce_op) = 0;
  // out = concatenation of every rank's `in`, in rank order. out.size() == world_size * in.size();
  // `in` may be this rank's slice of `out`.
  virtual Status all_gather(const OpContext& op, ConstBytes in, Bytes out) = 0;
  // out = this rank's slice of the reduction of `in`. in.size() == world_size * out.size(); `out`
  // may be this rank's slice of `in`.
  virtual Status reduce_scatter(const OpContext& op, ConstBytes in, Bytes out, DType dtype,
                                ReduceOp reduce_op) = 0;
  virtual Status barrier(const OpContext& op) = 0;
};

}  // namespace cadre
