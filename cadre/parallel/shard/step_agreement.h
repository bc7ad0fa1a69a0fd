// Agreement of the ranks of an optimizer before a step that changes what they share: an error of
// one rank is thrown on all, and settings that must be equal are compared.
//
// Threads: one. Blocking: collective, until the group's deadline; one all_reduce of
// kStepMessageBytes if no rank has an error and nothing differs. Lifetime: keeps nothing. Errors:
// those of tensor/group/agreement.h, the same on all ranks; if the ranks are not in the same step,
// those of wrap::LocatedGroup.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/hooks/located_group.h"

namespace cadre::shard {

struct StepTerms {
  const char* subject;               // the optimizer, as in AgreementSubject
  std::function<void()> check;       // throws if this rank cannot make the step
  std::function<uint64_t()> digest;  // returns a digest of the values that must be equal
  // Returns the values that must be equal. Called if the digests differ.
  std::function<std::vector<AgreedField>()> fields;
  std::string_view remedy;
  // Returns a digest of values that are expected to be equal. A difference is reported in the log
  // and is no error. Null means that there is no sample.
  std::function<uint64_t()> sample = {};
};

// The size of the message that the ranks reduce in each step: the bounds of digest and sample, and
// whether a rank has an error.
inline constexpr int64_t kStepMessageBytes = 5 * sizeof(int64_t);
// Agrees on the terms. Returns whether the samples are equal on all ranks.
CADRE_EXPORT bool agree_on_step(const wrap::LocatedGroup& group, const StepTerms& terms);

}  // namespace cadre::shard
