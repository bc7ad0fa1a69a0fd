#include "cadre/parallel/shard/step_agreement.h"

#include <ATen/ops/tensor.h>

#include <array>
#include <exception>

namespace cadre::shard {

bool agree_on_step(const wrap::LocatedGroup& group, const StepTerms& terms) {
  std::exception_ptr refusal;
  uint64_t digest = 0;
  uint64_t sample = 0;
  try {
    terms.check();
    digest = terms.digest();
    if (terms.sample) sample = terms.sample();
  } catch (...) {
    refusal = std::current_exception();
  }
  // Each number is sent together with its bitwise complement. The maximum of the complement is the
  // complement of the minimum. So the two maxima are complements of each other only if all ranks
  // have the same number.
  const auto own_digest = static_cast<int64_t>(digest);
  const auto own_sample = static_cast<int64_t>(sample);
  const std::array<int64_t, 5> own = {own_digest, ~own_digest, own_sample, ~own_sample,
                                      refusal ? 1 : 0};
  static_assert(sizeof(own) == kStepMessageBytes);
  const at::Tensor bounds = at::tensor(own, at::kLong);
  group.all_reduce(bounds, ReduceOp::kMax);
  const int64_t* const largest = bounds.const_data_ptr<int64_t>();
  if (largest[4] != 0) {
    check_on_all_ranks(group.process_group(), terms.subject, [&refusal] {
      if (refusal) std::rethrow_exception(refusal);
    });
  }
  if (largest[0] != ~largest[1]) {
    check_equal_on_all_ranks(group.process_group(), terms.subject, terms.fields, terms.remedy);
  }
  return largest[2] == ~largest[3];
}

}  // namespace cadre::shard
