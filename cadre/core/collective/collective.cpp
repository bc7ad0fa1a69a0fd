#include "cadre/core/collective/collective.h"

#include <functional>
#include <numeric>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/reduction_table.h"

namespace cadre {
namespace {

// The length of a buffer in elements, where n is the number of elements of a rank.
enum class Extent : uint8_t {
  kNone,
  kPart,   // n
  kWhole,  // n elements for each rank
  kOwnSplit,
  kSplits,
};

struct Rules {
  Extent in = Extent::kNone;
  Extent out = Extent::kNone;
  bool has_root = false;
  // One buffer is only used on the root: the output of reduce and gather, the input of scatter.
  bool is_of_root_only = false;
  bool may_be_in_place = true;
};

Rules rules_of(OpKind kind) {
  switch (kind) {
    case OpKind::kBroadcast:
      return {.in = Extent::kPart, .out = Extent::kPart, .has_root = true};
    case OpKind::kAllReduce:
      return {.in = Extent::kPart, .out = Extent::kPart};
    case OpKind::kAllGather:
      return {.in = Extent::kPart, .out = Extent::kWhole};
    case OpKind::kAllGatherV:
      return {.in = Extent::kOwnSplit, .out = Extent::kSplits};
    case OpKind::kReduceScatterV:
      return {.in = Extent::kSplits, .out = Extent::kOwnSplit};
    case OpKind::kReduceScatter:
      return {.in = Extent::kWhole, .out = Extent::kPart};
    case OpKind::kReduce:
      return {.in = Extent::kPart, .out = Extent::kPart, .has_root = true, .is_of_root_only = true};
    case OpKind::kGather:
      return {
          .in = Extent::kPart, .out = Extent::kWhole, .has_root = true, .is_of_root_only = true};
    case OpKind::kScatter:
      return {
          .in = Extent::kWhole, .out = Extent::kPart, .has_root = true, .is_of_root_only = true};
    case OpKind::kAllToAll:
      return {.in = Extent::kPart, .out = Extent::kPart, .may_be_in_place = false};
    case OpKind::kAllToAllV:
      return {.in = Extent::kSplits, .out = Extent::kSplits, .may_be_in_place = false};
    case OpKind::kBarrier:
    case OpKind::kSend:
    case OpKind::kRecv:
    case OpKind::kAllocate:
    case OpKind::kWaitSignal:
      break;
  }
  return {};
}

Error refused(std::string message) {
  return Error(ErrorCode::kInvalidArgument, std::move(message));
}

Status check_elements(OpKind kind, ConstBytes bytes, DType dtype) {
  if (bytes.size() % size_of(dtype) == 0) return {};
  return refused(format("{}: {} bytes are not a whole number of {} elements of {} bytes", kind,
                        bytes.size(), dtype, size_of(dtype)));
}

Status check_size(OpKind kind, std::string_view what, size_t actual, size_t expected) {
  if (actual == expected) return {};
  return refused(format("{}: {} has {} bytes, expected {}", kind, what, actual, expected));
}

bool overlap(ConstBytes a, ConstBytes b) {
  // std::less is defined also for pointers into different memory.
  const std::less<const std::byte*> is_before;
  return !a.empty() && !b.empty() && is_before(a.data(), b.data() + b.size()) &&
         is_before(b.data(), a.data() + a.size());
}

// Returns an error if the input and the output overlap in a way that is not allowed. `part` is the
// buffer with the elements of this rank. `other` is the second buffer; if it has the elements of
// all ranks, those of this rank begin at `offset`.
Status check_overlap(const Collective& c, ConstBytes part, ConstBytes other, size_t offset) {
  if (!overlap(part, other)) return {};
  if (!rules_of(c.kind).may_be_in_place) {
    return refused(format("{}: the input and the output overlap; pass separate buffers", c.kind));
  }
  const bool is_slice = part.size() != other.size();
  if (part.data() == other.data() + (is_slice ? offset : 0)) return {};
  return refused(format(
      "{}: the input and the output overlap, but not in place (in place means that {}); pass "
      "separate buffers",
      c.kind,
      is_slice ? "the shorter one is this rank's slice of the other" : "both are the same memory"));
}

Status check_reduction_of(const Collective& c) {
  if (!reduces(c.kind)) return {};
  const Status status = check_reduction(c.dtype, c.reduction.op());
  if (!status.ok()) return status.error().with_context(to_string(c.kind));
  if (c.reduction.op() != ReduceOp::kPremulSum || c.reduction.factor()) return {};
  return refused(format("{}: {} needs this rank's factor; pass Reduction::premul_sum(factor)",
                        c.kind, c.reduction.op()));
}

Status check_counts(const Collective& c, std::string_view side, ConstBytes buffer,
                    std::span<const uint64_t> counts, int world_size) {
  if (counts.size() != static_cast<size_t>(world_size)) {
    return refused(format("{}: {} counts for the {}, expected one for each of {} ranks", c.kind,
                          counts.size(), side, world_size));
  }
  const uint64_t num_elements = buffer.size() / size_of(c.dtype);
  uint64_t total = 0;
  for (const uint64_t count : counts) {
    // The counts are added one by one, so that the sum of huge counts cannot wrap around to the
    // expected number.
    if (count > num_elements - total) {
      return refused(format("{}: the counts for the {} add up to more than its {} {}", c.kind, side,
                            num_elements, c.dtype));
    }
    total += count;
  }
  if (total == num_elements) return {};
  return refused(format("{}: the counts for the {} add up to {}, but it has {} {}", c.kind, side,
                        total, num_elements, c.dtype));
}

Status check_splits(const Collective& c, int world_size) {
  CADRE_RETURN_IF_ERROR(check_elements(c.kind, c.in, c.dtype));
  CADRE_RETURN_IF_ERROR(check_elements(c.kind, c.out, c.dtype));
  CADRE_RETURN_IF_ERROR(check_overlap(c, c.in, c.out, 0));
  CADRE_RETURN_IF_ERROR(check_counts(c, "input", c.in, c.splits.input, world_size));
  CADRE_RETURN_IF_ERROR(check_counts(c, "output", c.out, c.splits.output, world_size));
  if (world_size > 1) return {};
  return check_size(c.kind, "the output", c.out.size(), c.in.size());
}

// Checks an all_gather_v or reduce_scatter_v. Returns the descriptor that the ranks compare: the
// total number of elements, and the counts as the shape.
Result<OpDescriptor> check_uneven_parts(const Collective& c, Rank rank, int world_size) {
  const bool is_gather = rules_of(c.kind).in == Extent::kOwnSplit;
  const ConstBytes whole = is_gather ? ConstBytes(c.out) : c.in;
  const ConstBytes part = is_gather ? c.in : ConstBytes(c.out);
  const std::vector<uint64_t>& counts = is_gather ? c.splits.output : c.splits.input;
  CADRE_RETURN_IF_ERROR(check_elements(c.kind, whole, c.dtype));
  CADRE_RETURN_IF_ERROR(check_reduction_of(c));
  CADRE_RETURN_IF_ERROR(check_counts(c, is_gather ? "output" : "input", whole, counts, world_size));
  const auto own = static_cast<size_t>(rank.value);
  const PartSizes parts = part_sizes(c);
  const std::vector<uint64_t>& sizes = is_gather ? parts.received : parts.sent;
  CADRE_RETURN_IF_ERROR(
      check_size(c.kind, is_gather ? "the input" : "the output", part.size(), sizes[own]));
  const uint64_t offset =
      std::accumulate(sizes.begin(), sizes.begin() + static_cast<ptrdiff_t>(own), uint64_t{0});
  CADRE_RETURN_IF_ERROR(check_overlap(c, part, whole, offset));
  const std::vector<int64_t> shape(counts.begin(), counts.end());
  return OpDescriptor{.kind = c.kind,
                      .dtype = c.dtype,
                      .reduce_op = c.reduction.op(),
                      .count = whole.size() / size_of(c.dtype),
                      .shape = PackedShape(shape)};
}

// Checks the buffers of a collective in which all ranks pass the same count n. Returns n.
Result<uint64_t> check_buffers(Collective& c, Rank rank, int world_size) {
  const Rules rules = rules_of(c.kind);
  const bool is_in_part = rules.in == Extent::kPart;
  const ConstBytes part = is_in_part ? c.in : ConstBytes(c.out);
  CADRE_RETURN_IF_ERROR(check_elements(c.kind, part, c.dtype));
  CADRE_RETURN_IF_ERROR(check_reduction_of(c));
  const uint64_t count = part.size() / size_of(c.dtype);
  if (rules.is_of_root_only && rank != c.root) {
    if (is_in_part) {
      c.out = {};
    } else {
      c.in = {};
    }
    return count;
  }
  const Extent extent = is_in_part ? rules.out : rules.in;
  const ConstBytes other = is_in_part ? ConstBytes(c.out) : c.in;
  const size_t num_parts = extent == Extent::kWhole ? static_cast<size_t>(world_size) : 1;
  CADRE_RETURN_IF_ERROR(check_size(c.kind, is_in_part ? "the output" : "the input", other.size(),
                                   part.size() * num_parts));
  if (c.kind == OpKind::kAllToAll && count % static_cast<uint64_t>(world_size) != 0) {
    return refused(format("{}: {} elements cannot be divided evenly among {} ranks; use {}", c.kind,
                          count, world_size, OpKind::kAllToAllV));
  }
  if (c.kind == OpKind::kBroadcast && part.data() != other.data()) {
    return refused(format(
        "{}: the input and the output are different buffers; pass one buffer as both", c.kind));
  }
  CADRE_RETURN_IF_ERROR(
      check_overlap(c, part, other, static_cast<size_t>(rank.value) * part.size()));
  return count;
}

Result<PackedShape> pack_shape(const Collective& c, uint64_t count) {
  if (!c.shape) return PackedShape();
  uint64_t num_elements = 1;
  for (const int64_t size : *c.shape) num_elements *= static_cast<uint64_t>(size);
  if (num_elements == count) return PackedShape(*c.shape);
  return refused(format(
      "{}: the shape has {} elements, but the buffer of this shape has {}; pass a shape that fits",
      c.kind, num_elements, count));
}

std::vector<uint64_t> bytes_of(std::span<const uint64_t> counts, DType dtype) {
  std::vector<uint64_t> sizes;
  sizes.reserve(counts.size());
  for (const uint64_t count : counts) sizes.push_back(count * size_of(dtype));
  return sizes;
}

}  // namespace

Collective Collective::broadcast(Bytes data, DType dtype, Rank root) {
  return {.kind = OpKind::kBroadcast, .dtype = dtype, .root = root, .in = data, .out = data};
}
Collective Collective::all_reduce(ConstBytes in, Bytes out, DType dtype, Reduction reduction) {
  return {.kind = OpKind::kAllReduce, .dtype = dtype, .reduction = reduction, .in = in, .out = out};
}
Collective Collective::all_gather(ConstBytes in, Bytes out, DType dtype) {
  return {.kind = OpKind::kAllGather, .dtype = dtype, .in = in, .out = out};
}
Collective Collective::all_gather_v(ConstBytes in, Bytes out, DType dtype,
                                    std::vector<uint64_t> counts) {
  return {.kind = OpKind::kAllGatherV,
          .dtype = dtype,
          .in = in,
          .out = out,
          .splits = {.output = std::move(counts)}};
}
Collective Collective::reduce_scatter_v(ConstBytes in, Bytes out, DType dtype, Reduction reduction,
                                        std::vector<uint64_t> counts) {
  return {.kind = OpKind::kReduceScatterV,
          .dtype = dtype,
          .reduction = reduction,
          .in = in,
          .out = out,
          .splits = {.input = std::move(counts)}};
}
Collective Collective::reduce_scatter(ConstBytes in, Bytes out, DType dtype, Reduction reduction) {
  return {
      .kind = OpKind::kReduceScatter, .dtype = dtype, .reduction = reduction, .in = in, .out = out};
}
Collective Collective::reduce(ConstBytes in, Bytes out, DType dtype, Reduction reduction,
                              Rank root) {
  return {.kind = OpKind::kReduce,
          .dtype = dtype,
          .reduction = reduction,
          .root = root,
          .in = in,
          .out = out};
}
Collective Collective::gather(ConstBytes in, Bytes out, DType dtype, Rank root) {
  return {.kind = OpKind::kGather, .dtype = dtype, .root = root, .in = in, .out = out};
}
Collective Collective::scatter(ConstBytes in, Bytes out, DType dtype, Rank root) {
  return {.kind = OpKind::kScatter, .dtype = dtype, .root = root, .in = in, .out = out};
}
Collective Collective::all_to_all(ConstBytes in, Bytes out, DType dtype) {
  return {.kind = OpKind::kAllToAll, .dtype = dtype, .in = in, .out = out};
}
Collective Collective::all_to_all_v(ConstBytes in, Bytes out, DType dtype, SplitCounts splits) {
  return {.kind = OpKind::kAllToAllV,
          .dtype = dtype,
          .in = in,
          .out = out,
          .splits = std::move(splits)};
}

Result<OpDescriptor> validate(Collective& c, Rank rank, int world_size) {
  const Rules rules = rules_of(c.kind);
  OpDescriptor descriptor{.kind = c.kind};
  if (c.kind == OpKind::kBarrier) return descriptor;
  if (rules.in == Extent::kNone) {
    return Error(ErrorCode::kInternal, format("{} is not a collective", c.kind));
  }
  descriptor.dtype = c.dtype;
  if (rules.has_root) {
    if (c.root < 0 || c.root >= world_size) {
      return refused(
          format("{}: root {} is not in the group of {} ranks", c.kind, c.root, world_size));
    }
    descriptor.root = c.root;
  } else {
    c.root = 0;
  }
  if (!reduces(c.kind)) c.reduction = ReduceOp::kSum;
  if (rules.in == Extent::kOwnSplit || rules.out == Extent::kOwnSplit) {
    return check_uneven_parts(c, rank, world_size);
  }
  if (reduces(c.kind)) descriptor.reduce_op = c.reduction.op();
  if (rules.in == Extent::kSplits) {
    CADRE_RETURN_IF_ERROR(check_splits(c, world_size));
    return descriptor;
  }
  const Result<uint64_t> count = check_buffers(c, rank, world_size);
  if (!count.ok()) return count.error();
  descriptor.count = *count;
  const Result<PackedShape> shape = pack_shape(c, *count);
  if (!shape.ok()) return shape.error();
  descriptor.shape = *shape;
  return descriptor;
}

PartSizes part_sizes(const Collective& c) {
  return {.sent = bytes_of(c.splits.input, c.dtype),
          .received = bytes_of(c.splits.output, c.dtype)};
}

}  // namespace cadre
