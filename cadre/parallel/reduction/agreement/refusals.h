// The errors that the reducer throws from a backward. Each message names the remedy.
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
// All ranks throw this error: no rank has a sample.
[[noreturn]] void refuse_no_samples(const Wrapper& wrapper);
[[noreturn]] void refuse_direct_call(const Wrapper& wrapper, const std::string& parameter);
[[noreturn]] void refuse_repeated_gradient(const Wrapper& wrapper, const std::string& parameter);
// of_forwards: sample counts of the forwards of the pass; the message names the first of them, and
// num_samples, which needs another weight.
[[noreturn]] void refuse_unlike_shares(const Wrapper& wrapper, std::span<const int64_t> of_forwards,
                                       int64_t num_samples);

// refuse_exchange() is thrown on all ranks: a differentiable collective has run in the backward on
// `ranks`, and rank 0 and the rank `other` have unequal numbers of samples.
struct UnequalSamples {
  int64_t of_0;
  int64_t of_other;
  int other;
};
[[noreturn]] void refuse_exchange(const Wrapper& wrapper, const std::string& ranks,
                                  const UnequalSamples& samples);

}  // namespace cadre::reduction
