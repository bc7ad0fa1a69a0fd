// What the reducer refuses in a backward, in words, with the remedy.
//
// Threads: any. Blocking: never. Errors: each throws kInvalidArgument.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cadre/parallel/reduction/agreement/wrapper.h"

namespace cadre::reduction {

[[noreturn]] void refuse_lost_wrapper(const Wrapper& wrapper);
[[noreturn]] void refuse_second_backward(const Wrapper& wrapper);
[[noreturn]] void refuse_create_graph(const Wrapper& wrapper);
// On all ranks: none has a sample.
[[noreturn]] void refuse_no_samples(const Wrapper& wrapper);
[[noreturn]] void refuse_direct_call(const Wrapper& wrapper, const std::string& parameter);
[[noreturn]] void refuse_repeated_gradient(const Wrapper& wrapper, const std::string& parameter);
// of_forwards: the samples by which the pass is weighted; the first decides.
[[noreturn]] void refuse_unlike_shares(const Wrapper& wrapper, std::span<const int64_t> of_forwards,
                                       int64_t num_samples);

// On all ranks: a differentiable collective has run in the backward on `ranks`, whose weights
// differ.
struct UnequalSamples {
  int64_t of_0;
  int64_t of_other;
  int other;
};
[[noreturn]] void refuse_exchange(const Wrapper& wrapper, const std::string& ranks,
                                  const UnequalSamples& samples);

}  // namespace cadre::reduction
