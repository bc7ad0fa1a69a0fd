// The interface of every engine that moves and reduces bytes for a group.
//
// Threads: one operation at a time, from whichever thread holds the group's progress role.
// Blocking: every operation, until done, its deadline or the group's Interrupt.
// Lifetime: buffers are borrowed until the call returns.
// Errors: kTimeout and kPeerLost with OpProgress::waiting_for naming the peer; kAborted when the
// Interrupt was raised; kInvalidArgument when a peer called another operation
// (OpProgress::set_mismatch) or the parts of an all_to_all_v do not fit (part_mismatch), then on
// all ranks. After an error the group is unusable; buffers hold anything. Numerics: the order of
// additions is fixed by (op, dtype, count, world size), never by arrival; all ranks end with
// identical bits. bfloat16 is accumulated in float32 and rounded once. Source: the operations are
// c10d's, with one flat buffer a side.
#pragma once

#include <cstdint>
#include <span>
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

// Bytes of each rank's part of the two buffers of an all_to_all_v, in rank order. Each span has one
// entry for each rank; they add up to the sizes of the buffers.
struct PartSizes {
  std::span<const uint64_t> sent;      // sent[r] bytes of `in` go to rank r
  std::span<const uint64_t> received;  // received[r] bytes of `out` come from rank r
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

  // On the root, out = what all_reduce would give, bit for bit; `out` may be `in` there. Elsewhere
  // `out` is not looked at and may be empty, and `in` keeps its content.
  virtual Status reduce(const OpContext& op, ConstBytes in, Bytes out, DType dtype,
                        ReduceOp reduce_op, Rank root) = 0;
  // On the root, out = concatenation of every rank's `in`, in rank order; out.size() == world_size
  // * in.size(), and `in` may be the root's slice of it. Elsewhere `out` is not looked at.
  virtual Status gather(const OpContext& op, ConstBytes in, Bytes out, Rank root) = 0;
  // out = this rank's slice of the root's `in`. There in.size() == world_size * out.size(), and
  // `out` may be the root's slice of it. Elsewhere `in` is not looked at.
  virtual Status scatter(const OpContext& op, ConstBytes in, Bytes out, Rank root) = 0;
  // Slice i of rank j's `out` = slice j of rank i's `in`, of world_size equal slices. in.size() ==
  // out.size(); the two are disjoint.
  virtual Status all_to_all(const OpContext& op, ConstBytes in, Bytes out) = 0;
  // The same with parts of any sizes, also none: part i of rank j's `out` = part j of rank i's
  // `in`. What one rank sends must be what the other expects; all ranks find out before any data
  // moves. `in` and `out` are disjoint.
  virtual Status all_to_all_v(const OpContext& op, ConstBytes in, Bytes out,
                              const PartSizes& sizes) = 0;
};

}  // namespace cadre
