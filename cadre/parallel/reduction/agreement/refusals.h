// The errors that the reducer throws from a backward. Each function throws kInvalidArgument, and
// its message says what the program must change.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cadre/parallel/reduction/agreement/wrapper.h"

namespace cadre::reduction {

[[noreturn]] void refuse_lost_wrapper(const Wrapper& wrapper);
[[noreturn]] void refuse_second_backward(const Wrapper& wrapper);
[[noreturn]] void refuse_create_graph(const Wrapper& wrapper);
// All ranks throw this error if no rank has a sample in the step, because then there is no mean.
[[noreturn]] void refuse_no_samples(const Wrapper& wrapper);
[[noreturn]] void refuse_direct_call(const Wrapper& wrapper, const std::string& parameter);
[[noreturn]] void refuse_repeated_gradient(const Wrapper& wrapper, const std::string& parameter);
// Throws if one pass has forwards in which this rank has different shares of the samples, so that
// one weight does not fit both. The message names of_forwards[0] and num_samples, the sample counts
// of the first forward and of the one that needs another weight.
[[noreturn]] void refuse_unlike_shares(const Wrapper& wrapper, std::span<const int64_t> of_forwards,
                                       int64_t num_samples);

// All ranks throw this error: a differentiable collective among the ranks `ranks` has run in the
// backward, and rank 0 and the rank `other` have unequal numbers of samples.
struct UnequalSamples {
  int64_t of_0;
  int64_t of_other;
  int other;
};
[[noreturn]] void refuse_exchange(const Wrapper& wrapper, const std::string& ranks,
                                  const UnequalSamples& samples);

}  // namespace cadre::reduction
