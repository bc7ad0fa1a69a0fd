// The refusals of calls whose arguments cannot be right on any rank.
//
// Threads: any. Blocking: never. Errors: each throws kInvalidArgument that begins with the call's
// name, says what was passed and what was expected.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "cadre/base/types.h"

namespace cadre {

[[noreturn]] void refuse_call(std::string message);

void check_elements(std::string_view call, ConstBytes bytes, DType dtype);
// `what` has `actual` bytes.
void check_sizes(std::string_view call, size_t actual, size_t expected, std::string_view what);
void check_reduction(std::string_view call, DType dtype, ReduceOp op);
// `what` is "root" or "the peer".
void check_rank(std::string_view call, std::string_view what, Rank rank, int world_size);
void check_peer(std::string_view call, Rank peer, Rank self, int world_size);
// Refuses buffers that overlap, unless `part` is slice `rank` of `whole`. Of equal sizes: rank 0.
void check_in_place(std::string_view call, ConstBytes part, ConstBytes whole, Rank rank);
void check_disjoint(std::string_view call, ConstBytes in, ConstBytes out);

}  // namespace cadre
