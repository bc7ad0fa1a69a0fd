// One collective of one rank as a value: what it computes, and on which memory. validate() checks
// it once; the code between the caller and the engine only reads it.
//
// Threads: plain values; validate() is pure. Blocking: never. Lifetime: borrows the buffers and the
// shape; owns the splits.
// Errors: validate() returns kInvalidArgument; the message begins with the name of the collective
// and says what was passed and what was expected.
// Sizes of `in` and `out` in elements, for P ranks. n is the count that must be equal on all ranks
// (OpDescriptor::count):
//
//   kind             in          out
//   broadcast        n, and `out` is the same memory
//   all_reduce       n           n
//   all_gather       n           P n, in rank order
//   all_gather_v     splits.output[rank]   the sum of splits.output, in rank order
//   reduce_scatter   P n         n
//   reduce_scatter_v the sum of splits.input, in rank order   splits.input[rank]
//   reduce           n           n on the root
//   gather           n           P n on the root
//   scatter          P n on the root   n
//   all_to_all       n, which P divides   n
//   all_to_all_v     the sum of splits.input   the sum of splits.output
//   barrier          none        none
//
// `in` and `out` may be the same memory, or the shorter buffer may be this rank's slice of the
// longer one. Exception: the two buffers of all_to_all and all_to_all_v must not overlap.
// Source: the arguments of c10d::Backend, and of NCCL's calls.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/completion.h"
#include "cadre/core/collective/op.h"

namespace cadre {

// Says how the inputs of the ranks are combined. A ReduceOp converts to it implicitly. A premul_sum
// also contains its factor.
class CADRE_EXPORT Reduction {
 public:
  // Converts an operation. A kPremulSum that is converted has no factor, so validate() returns an
  // error for it.
  constexpr Reduction(ReduceOp op = ReduceOp::kSum) : op_(op) {}  // NOLINT: implicit by design
  // Returns the sum of each rank's input times that rank's factor. The factors may differ between
  // ranks. Source: ncclRedOpCreatePreMulSum.
  static constexpr Reduction premul_sum(double factor) {
    Reduction reduction(ReduceOp::kPremulSum);
    reduction.factor_ = factor;
    return reduction;
  }

  constexpr ReduceOp op() const { return op_; }
  constexpr std::optional<double> factor() const { return factor_; }

 private:
  ReduceOp op_;
  std::optional<double> factor_ = {};
};

// The number of elements that an uneven collective moves between this rank and each rank r, 0
// allowed: input[r] elements go to rank r, and output[r] come from rank r. An all_gather_v has
// output counts only, and a reduce_scatter_v input counts only; both must be equal on all ranks.
struct SplitCounts {
  std::vector<uint64_t> input = {};
  std::vector<uint64_t> output = {};
};

struct CADRE_EXPORT Collective {
  static Collective broadcast(Bytes data, DType dtype, Rank root);
  static Collective all_reduce(ConstBytes in, Bytes out, DType dtype, Reduction reduction);
  static Collective all_gather(ConstBytes in, Bytes out, DType dtype);
  // counts[r] is the number of elements of rank r's input; all ranks pass the same counts.
  static Collective all_gather_v(ConstBytes in, Bytes out, DType dtype,
                                 std::vector<uint64_t> counts);
  static Collective reduce_scatter(ConstBytes in, Bytes out, DType dtype, Reduction reduction);
  // counts[r] is the number of elements of rank r's output; all ranks pass the same counts.
  static Collective reduce_scatter_v(ConstBytes in, Bytes out, DType dtype, Reduction reduction,
                                     std::vector<uint64_t> counts);
  static Collective reduce(ConstBytes in, Bytes out, DType dtype, Reduction reduction, Rank root);
  static Collective gather(ConstBytes in, Bytes out, DType dtype, Rank root);
  static Collective scatter(ConstBytes in, Bytes out, DType dtype, Rank root);
  static Collective all_to_all(ConstBytes in, Bytes out, DType dtype);
  static Collective all_to_all_v(ConstBytes in, Bytes out, DType dtype, SplitCounts splits);
  static Collective barrier() { return {}; }

  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUint8;
  Reduction reduction = {};  // used by all_reduce, reduce_scatter, reduce_scatter_v and reduce
  Rank root = 0;             // used by broadcast, reduce, gather and scatter
  ConstBytes in = {};
  Bytes out = {};
  SplitCounts splits = {};  // used by all_gather_v, reduce_scatter_v and all_to_all_v
  Device device = {};       // the device whose memory `in` and `out` are in
  // The point in the caller's work behind which a stream-ordered engine runs the operation, such as
  // a point on the stream that is current at the call. If null, the operation may run at once.
  std::shared_ptr<const DevicePoint> after = {};
  // The shape of the tensor that has the n elements, for collectives in which all ranks have the
  // same n. If shapes differ between ranks, the call fails on all ranks, even if the numbers of
  // elements are equal. nullopt means one dimension.
  std::optional<std::span<const int64_t>> shape = {};
};

// Returns whether the kind combines the ranks' inputs by a Reduction.
constexpr bool reduces(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter ||
         kind == OpKind::kReduceScatterV || kind == OpKind::kReduce;
}

// Returns the descriptor that the ranks compare, or an error. Sets the buffers that this rank does
// not use to empty: the output of reduce and gather, and the input of scatter, on ranks other than
// the root.
CADRE_EXPORT Result<OpDescriptor> validate(Collective& collective, Rank rank, int world_size);

// The sizes in bytes of the parts of a validated all_to_all_v.
struct PartSizes {
  std::vector<uint64_t> sent;      // sent[r] bytes of `in` go to rank r
  std::vector<uint64_t> received;  // received[r] bytes of `out` come from rank r
};
PartSizes part_sizes(const Collective& collective);

}  // namespace cadre
