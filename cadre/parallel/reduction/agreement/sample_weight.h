// The weight of a rank's gradients in a pass: its share of the samples of all ranks. Also checks
// whether the rank has the same share in every forward of the pass.
//
// Blocking: agree_on_weight() is collective. Errors: those of the group.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "cadre/tensor/hooks/located_group.h"

namespace cadre::reduction {

// The size of the message that GradientWeighting::kSamples sends before each synchronized backward.
inline constexpr int64_t kSampleMessageBytes = 128;

struct PassSamples {
  int64_t num_accumulated = 0;  // samples of backwards under no_sync() since the last pass
  // The sample count of each forward of the pass, empty if there is none. The weight is computed
  // from the first one.
  std::span<const int64_t> of_forwards = {};
};

struct SampleWeight {
  double weight = 1.0;
  // True if the weights of all ranks are equal. The flag is the same on all ranks, so all of them
  // can average instead of weighting.
  bool is_equal_on_all = false;
  // The index in `of_forwards` of a forward in which this rank's share of the samples differs from
  // its share in the first one.
  std::optional<size_t> unlike = {};
  // A forward that joins this pass later must have this number of samples. If nullopt, no forward
  // may join.
  std::optional<int64_t> needed_of_others = {};
};

// Sums the samples over the ranks, separately for each index in `of_forwards`: forwards of two
// ranks with the same index belong together. If on every rank all forwards of the pass have one
// sample count, and no samples were accumulated, the shares need not be equal, and ranks may have
// different numbers of forwards. Returns nullopt on all ranks if the pass has forwards but no rank
// has a sample, because then there is no mean.
std::optional<SampleWeight> agree_on_weight(const wrap::LocatedGroup& group,
                                            const PassSamples& own);

// Returns the weight for the plain mean over ranks, whatever their numbers of samples.
SampleWeight equal_weight(const wrap::LocatedGroup& group);

}  // namespace cadre::reduction
