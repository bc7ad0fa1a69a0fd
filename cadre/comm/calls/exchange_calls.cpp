#include "cadre/comm/calls/exchange_calls.h"

#include <string_view>

#include "cadre/base/format.h"
#include "cadre/comm/calls/checks.h"
#include "cadre/comm/calls/make_operation.h"

namespace cadre {
namespace {

// The bytes of each part, behind those already there.
void append_part_bytes(std::vector<uint64_t>& bytes, std::string_view side, size_t buffer_bytes,
                       std::span<const uint64_t> counts, DType dtype, const Caller& caller) {
  if (counts.size() != static_cast<size_t>(caller.world_size)) {
    refuse_call(format("all_to_all_v: {} counts for the {}, expected one for each of {} ranks",
                       counts.size(), side, caller.world_size));
  }
  const uint64_t num_elements = buffer_bytes / size_of(dtype);
  uint64_t total = 0;
  for (const uint64_t count : counts) {
    // Checked one by one, so that no sum of huge counts wraps round to the right one.
    if (count > num_elements - total) {
      refuse_call(format("all_to_all_v: the counts for the {} add up to more than its {} {}", side,
                         num_elements, dtype));
    }
    total += count;
    bytes.push_back(count * size_of(dtype));
  }
  if (total == num_elements) return;
  refuse_call(format("all_to_all_v: the counts for the {} add up to {}, but it has {} {}", side,
                     total, num_elements, dtype));
}

}  // namespace

Operation reduce_of(ConstBytes in, Bytes out, const ReduceKind& kind, Rank root,
                    const Caller& caller, const CollectiveOptions& options) {
  check_rank("reduce", "root", root, caller.world_size);
  check_elements("reduce", in, kind.dtype);
  check_reduction("reduce", kind.dtype, kind.op);
  const bool is_root = caller.rank == root;
  if (is_root) {
    check_sizes("reduce", out.size(), in.size(), "the output");
    check_in_place("reduce", in, out, 0);
  }
  return make_operation(
      {OpKind::kReduce, kind.dtype, kind.op, root, in.size() / size_of(kind.dtype)}, in,
      is_root ? out : Bytes(), options);
}

Operation gather_of(ConstBytes in, Bytes out, DType dtype, Rank root, const Caller& caller,
                    const CollectiveOptions& options) {
  check_rank("gather", "root", root, caller.world_size);
  check_elements("gather", in, dtype);
  const bool is_root = caller.rank == root;
  if (is_root) {
    check_sizes("gather", out.size(), in.size() * static_cast<size_t>(caller.world_size),
                "the output");
    check_in_place("gather", in, out, root);
  }
  return make_operation({OpKind::kGather, dtype, ReduceOp::kSum, root, in.size() / size_of(dtype)},
                        in, is_root ? out : Bytes(), options);
}

Operation scatter_of(ConstBytes in, Bytes out, DType dtype, Rank root, const Caller& caller,
                     const CollectiveOptions& options) {
  check_rank("scatter", "root", root, caller.world_size);
  check_elements("scatter", out, dtype);
  const bool is_root = caller.rank == root;
  if (is_root) {
    check_sizes("scatter", in.size(), out.size() * static_cast<size_t>(caller.world_size),
                "the input");
    check_in_place("scatter", out, in, root);
  }
  return make_operation(
      {OpKind::kScatter, dtype, ReduceOp::kSum, root, out.size() / size_of(dtype)},
      is_root ? in : ConstBytes(), out, options);
}

Operation all_to_all_of(ConstBytes in, Bytes out, DType dtype, const Caller& caller,
                        const CollectiveOptions& options) {
  check_elements("all_to_all", in, dtype);
  check_sizes("all_to_all", out.size(), in.size(), "the output");
  const uint64_t count = in.size() / size_of(dtype);
  if (count % static_cast<uint64_t>(caller.world_size) != 0) {
    refuse_call(
        format("all_to_all: {} elements cannot be divided evenly among {} ranks; use "
               "all_to_all_v",
               count, caller.world_size));
  }
  check_disjoint("all_to_all", in, out);
  return make_operation({OpKind::kAllToAll, dtype, ReduceOp::kSum, 0, count}, in, out, options);
}

Operation all_to_all_v_of(ConstBytes in, Bytes out, DType dtype, const SplitCounts& counts,
                          const Caller& caller, const CollectiveOptions& options) {
  check_elements("all_to_all_v", in, dtype);
  check_elements("all_to_all_v", out, dtype);
  check_disjoint("all_to_all_v", in, out);
  Operation operation =
      make_operation({.kind = OpKind::kAllToAllV, .dtype = dtype}, in, out, options);
  append_part_bytes(operation.part_bytes, "input", in.size(), counts.input, dtype, caller);
  append_part_bytes(operation.part_bytes, "output", out.size(), counts.output, dtype, caller);
  if (caller.world_size == 1) check_sizes("all_to_all_v", out.size(), in.size(), "the output");
  return operation;
}

}  // namespace cadre
