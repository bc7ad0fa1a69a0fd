#include "cadre/comm/calls/checks.h"

#include <functional>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/collective/reduction_table.h"

namespace cadre {

void refuse_call(std::string message) {
  throw Error(ErrorCode::kInvalidArgument, std::move(message));
}

void check_elements(std::string_view call, ConstBytes bytes, DType dtype) {
  if (bytes.size() % size_of(dtype) == 0) return;
  refuse_call(format("{}: {} bytes are not a whole number of {} elements of {} bytes", call,
                     bytes.size(), dtype, size_of(dtype)));
}

void check_sizes(std::string_view call, size_t actual, size_t expected, std::string_view what) {
  if (actual == expected) return;
  refuse_call(format("{}: {} has {} bytes, expected {}", call, what, actual, expected));
}

void check_reduction(std::string_view call, DType dtype, ReduceOp op) {
  const Status status = cadre::check_reduction(dtype, op);
  if (!status.ok()) throw status.error().with_context(call);
}

void check_rank(std::string_view call, std::string_view what, Rank rank, int world_size) {
  if (rank >= 0 && rank < world_size) return;
  refuse_call(format("{}: {} {} is not in the group of {} ranks", call, what, rank, world_size));
}

void check_peer(std::string_view call, Rank peer, Rank self, int world_size) {
  check_rank(call, "the peer", peer, world_size);
  if (peer != self) return;
  refuse_call(format("{}: rank {} is this rank itself; copy the data instead", call, peer));
}

namespace {

bool overlap(ConstBytes a, ConstBytes b) {
  const std::less<const std::byte*> is_before;  // defined for pointers into different memory
  return !a.empty() && !b.empty() && is_before(a.data(), b.data() + b.size()) &&
         is_before(b.data(), a.data() + a.size());
}

}  // namespace

void check_in_place(std::string_view call, ConstBytes part, ConstBytes whole, Rank rank) {
  if (!overlap(part, whole)) return;
  if (part.data() == whole.data() + static_cast<size_t>(rank.value) * part.size()) return;
  refuse_call(
      format("{}: the input and the output overlap, but not in place, where {}; pass "
             "separate buffers",
             call,
             part.size() == whole.size() ? "both are the same"
                                         : "the shorter one is this rank's slice of the other"));
}

void check_disjoint(std::string_view call, ConstBytes in, ConstBytes out) {
  if (!overlap(in, out)) return;
  refuse_call(format("{}: the input and the output overlap; pass separate buffers", call));
}

}  // namespace cadre
