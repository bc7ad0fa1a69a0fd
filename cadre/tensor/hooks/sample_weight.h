// The weight of a rank's gradients in a pass: its share of the samples, and whether that share
// serves every forward that the pass carries.
//
// Threads: one. Blocking: agree_on_weight() is collective. Errors: as the group.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "cadre/core/base/export.h"
#include "cadre/tensor/hooks/located_group.h"

namespace cadre {

enum class GradientWeighting {
  // Every rank's gradient counts the same, whatever the sizes of the batches.
  kEqual,
  // Every rank's gradient counts by the samples it is the mean of, so the result is the mean over
  // all samples; a rank without any contributes zeros, and still runs its backward. A forward has
  // as many samples as its first tensor has rows (size(0)), unless set_num_samples() says
  // how many.
  // Costs one message of 128 bytes before each synchronized backward.
  kSamples,
  // Gradients are added up: for a loss that is divided by the samples or tokens of all ranks, such
  // as that of mean_over_tokens().
  kSum,
};
// "GradientWeighting::kEqual".
CADRE_EXPORT std::string_view to_string(GradientWeighting weighting);

// Size of the message that kSamples sends before each synchronized backward.
inline constexpr int64_t kSampleMessageBytes = 128;

struct PassSamples {
  int64_t num_accumulated = 0;                // under no_sync(), since the last pass
  std::span<const int64_t> of_forwards = {};  // the first is weighted; empty without a forward
};

struct SampleWeight {
  double weight = 1.0;
  // The weights of all ranks are equal. All ranks have the same value here, so all can average.
  bool is_equal_on_all = false;
  // A forward of which this rank has another share, by its place in `of_forwards`.
  std::optional<size_t> unlike = {};
  // Sample count that every further forward of this pass must have; nullopt: none is allowed.
  std::optional<int64_t> needed_of_others = {};
};

// Sums the samples over the ranks, separately for each forward: two ranks' forwards are the same if
// they have the same place in the list. A pass whose forwards have one count only on every rank,
// and nothing accumulated, needs no more: ranks may have different numbers of forwards. nullopt on
// all ranks if forwards are carried and no rank has a sample: there is no mean.
std::optional<SampleWeight> agree_on_weight(const wrap::LocatedGroup& group,
                                            const PassSamples& own);

// The weight when every rank counts the same, whatever its number of samples.
SampleWeight equal_weight(const wrap::LocatedGroup& group);

}  // namespace cadre
