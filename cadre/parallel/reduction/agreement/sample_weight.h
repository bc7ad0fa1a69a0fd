// The weight of a rank's gradients in a pass: its share of the samples; and whether the rank has
// the same share in every forward that the pass carries.
//
// Threads: one. Blocking: agree_on_weight() is collective. Errors: as the group.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "cadre/tensor/hooks/located_group.h"

namespace cadre::reduction {

// The size of the message that GradientWeighting::kSamples sends before each synchronized backward.
inline constexpr int64_t kSampleMessageBytes = 128;

struct PassSamples {
  int64_t num_accumulated = 0;  // the number of samples under no_sync() since the last pass
  // The samples of each forward. The first is weighted. It is empty if there is no forward.
  std::span<const int64_t> of_forwards = {};
};

struct SampleWeight {
  double weight = 1.0;
  // The weights of all ranks are equal. All ranks set this flag alike, so that all can average.
  bool is_equal_on_all = false;
  // The place in `of_forwards` of a forward in which this rank has another share.
  std::optional<size_t> unlike = {};
  // The number of samples that every further forward of this pass must have. If nullopt, no further
  // forward is allowed.
  std::optional<int64_t> needed_of_others = {};
};

// Sums the samples over the ranks, separately for each forward: two ranks' forwards are the same if
// they have the same place in the list. If on every rank all forwards of the pass have one count,
// and no samples were accumulated, the shares of the forwards need not be equal, and ranks may have
// different numbers of forwards. Returns nullopt on all ranks if forwards are carried and no rank
// has a sample, because there is no mean.
std::optional<SampleWeight> agree_on_weight(const wrap::LocatedGroup& group,
                                            const PassSamples& own);

// Returns the weight that gives the gradients of all ranks equal weights, whatever their numbers of
// samples.
SampleWeight equal_weight(const wrap::LocatedGroup& group);

}  // namespace cadre::reduction
