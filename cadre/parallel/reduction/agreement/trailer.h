// The trailer is a few elements after the last bucket. At the end of each pass it tells the ranks
// whether one of them has something to report. It also tells them whether all ranks are in a pass
// of the same wrapper and at the same place among its forwards, have changed their parameters
// equally often, and have equal samples of the parameters' values.
//
// Threads: plain functions. Blocking: never. Errors: none. The ranks can only sum the trailer, in
// the bucket's dtype, and bfloat16 counts exactly only up to 256. So each bit of a number is sent
// as two elements: the bit and its complement. If all ranks agree, one of the two sums is zero, in
// every dtype, and whether the sums are averaged or not.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace cadre::reduction {

// The forwards of this rank through which no backward has gone, other than those that the pass
// carries.
struct StepPosition {
  int32_t num_older = 0;
  int32_t num_newer = 0;  // the number of forwards newer than the newest one that the pass carries
  // The places of these forwards among all that were entered or waited since the last pass: a bit
  // for each place, one bit for all places from kMaxPlace on.
  int32_t places = 0;
  static constexpr int32_t kMaxPlace = 30;

  bool operator==(const StepPosition&) const = default;
};

// A bit in the number of a rank's wrapper: a forward of the wrapper got the buffers of another
// wrapper. Rank 0, which sends the buffers, never has the bit, so the ranks differ.
inline constexpr uint32_t kGotOtherBuffers = uint32_t{1} << 31;

inline constexpr int64_t kTrailerNumel = 167;

struct TrailerWord {
  uint32_t wrapper = 0;  // the number of the wrapper in its group; may have kGotOtherBuffers
  StepPosition position = {};
  bool has_news = false;
  uint8_t num_writes = 0;  // the number of writes to the parameters since the last pass, modulo 256
  uint32_t samples = 0;    // a digest of samples of the parameters' values (ReplicaWatch)
};

// trailer: (kTrailerNumel), any floating-point dtype.
void write_trailer(const at::Tensor& trailer, const TrailerWord& word);

// Called after the reduction. Returns whether some rank has something to report, or the wrappers,
// the positions, the numbers of writes or the samples differ. The result is the same on all ranks.
bool trailer_needs_attention(const at::Tensor& trailer);

}  // namespace cadre::reduction
