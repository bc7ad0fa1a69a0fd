// Lets the ranks agree before an optimizer step that changes shared state: if a check fails on one
// rank, all ranks throw its error, and settings that must be equal are compared.
//
// Blocking: a collective, until the group's deadline. It is one all_reduce of kStepMessageBytes,
// unless a check fails or settings differ. Errors: those of tensor/group/agreement.h, the same on
// all ranks; if the ranks are in different steps, those of wrap::LocatedGroup.
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
  const char* subject;               // the optimizer's name in errors, as in AgreementSubject
  std::function<void()> check;       // throws if this rank cannot step
  std::function<uint64_t()> digest;  // returns a hash of the settings that must be equal
  // Returns the settings that must be equal. Called only if the digests differ, for the error.
  std::function<std::vector<AgreedField>()> fields;
  std::string_view remedy;
  // Returns a hash of values that are expected to be equal, for example of a few elements of the
  // gradients. A difference is not an error: agree_on_step() returns false. If null, no values are
  // compared.
  std::function<uint64_t()> sample = {};
};

// The size of the message that is all_reduced in each step: the minimum and the maximum of the
// digest and of the sample, and whether a check has failed.
inline constexpr int64_t kStepMessageBytes = 5 * sizeof(int64_t);
// Makes the checks that `terms` describes. Returns whether the samples are equal on all ranks.
CADRE_EXPORT bool agree_on_step(const wrap::LocatedGroup& group, const StepTerms& terms);

}  // namespace cadre::shard
