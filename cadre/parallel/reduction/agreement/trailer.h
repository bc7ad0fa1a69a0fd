// The trailer is a few elements behind the last bucket, reduced together with it. When a pass ends,
// the sum of the ranks' trailers shows whether some rank has something to report. It also shows
// whether all ranks reduce gradients of the same wrapper, at the same position among its forwards,
// have changed their parameters equally often, and have equal samples of the parameters' values.
//
// The ranks can only sum the trailer, in the bucket's dtype, and bfloat16 counts exactly only up to
// 256. So each bit of a number is sent as two elements: the bit and its complement. If all ranks
// agree, one of the two sums is zero, in every dtype, and whether the ranks sum or average.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace cadre::reduction {

// Counts the forwards of this rank that still wait for a backward. The forwards of the current pass
// are not counted.
struct StepPosition {
  int32_t num_older = 0;
  int32_t num_newer = 0;  // the number of forwards newer than the newest one of the pass
  // A bit mask of the places of these forwards among all that began since the last pass or waited
  // when it ended: one bit for each place, and one for all places from kMaxPlace on.
  int32_t places = 0;
  static constexpr int32_t kMaxPlace = 30;

  bool operator==(const StepPosition&) const = default;
};

// This bit is set in the number of a rank's wrapper if a forward of the wrapper received the
// buffers of another wrapper. Rank 0 sends the buffers and never sets the bit, so the ranks'
// numbers differ.
inline constexpr uint32_t kGotOtherBuffers = uint32_t{1} << 31;

inline constexpr int64_t kTrailerNumel = 167;

struct TrailerWord {
  uint32_t wrapper = 0;  // the wrapper's number in its group, perhaps with kGotOtherBuffers
  StepPosition position = {};
  bool has_news = false;
  uint8_t num_writes = 0;  // the number of writes to the parameters since the last pass, modulo 256
  uint32_t samples = 0;    // a digest of samples of the parameters' values (ReplicaWatch)
};

// `trailer` has the shape (kTrailerNumel) and any floating-point dtype.
void write_trailer(const at::Tensor& trailer, const TrailerWord& word);

// Called after the reduction. Returns whether some rank has something to report, or the wrappers,
// the positions, the numbers of writes or the samples differ. The result is the same on all ranks.
bool trailer_needs_attention(const at::Tensor& trailer);

}  // namespace cadre::reduction
