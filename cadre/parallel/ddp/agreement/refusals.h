// What the reducer refuses in a backward, in words, with the remedy.
//
// Threads: any. Blocking: never. Errors: each throws kInvalidArgument.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cadre/base/types.h"

namespace cadre {

[[noreturn]] void refuse_lost_wrapper(Rank rank);
[[noreturn]] void refuse_second_backward(Rank rank);
[[noreturn]] void refuse_create_graph(Rank rank);
// On all ranks: none has a sample.
[[noreturn]] void refuse_no_samples(Rank rank);
[[noreturn]] void refuse_direct_call(Rank rank, const std::string& parameter);
[[noreturn]] void refuse_repeated_gradient(Rank rank, const std::string& parameter);
// of_forwards: the samples by which the pass is weighted; the first decides.
[[noreturn]] void refuse_unlike_shares(Rank rank, std::span<const int64_t> of_forwards,
                                       int64_t num_samples);

}  // namespace cadre
