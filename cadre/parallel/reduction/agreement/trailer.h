// What the ranks tell each other at the end of each pass, in the elements behind the last bucket:
// whether one of them has news, whether all are in a pass of the same wrapper, whether they are at
// the same place among its forwards, whether they have changed their parameters equally often, and
// whether samples of the values of these are the same.
//
// Threads: plain functions. Blocking: never. Errors: none.
// Sums over ranks in the bucket's dtype are all there is, and bfloat16 counts to 256 only. So each
// bit of a number is sent as two elements, the bit and its complement: where all ranks agree, one
// of the two sums is zero, in every dtype, and whether they are averaged or not.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace cadre::reduction {

// Forwards of this rank that no backward has gone through, beside those that the pass carries.
struct StepPosition {
  int32_t num_older = 0;
  int32_t num_newer = 0;  // than the newest that the pass carries
  // Which they are among all that were entered or waited since the last pass: a bit for each place,
  // one bit for all places from kMaxPlace on.
  int32_t places = 0;
  static constexpr int32_t kMaxPlace = 30;

  bool operator==(const StepPosition&) const = default;
};

// In the number of a rank's wrapper: a forward of it got the buffers of another one. Rank 0, which
// sends them, never has it, so the ranks differ.
inline constexpr uint32_t kGotOtherBuffers = uint32_t{1} << 31;

inline constexpr int64_t kTrailerNumel = 167;

struct TrailerWord {
  uint32_t wrapper = 0;  // number of the wrapper in its group; may have kGotOtherBuffers
  StepPosition position = {};
  bool has_news = false;
  uint8_t num_writes = 0;  // to the parameters, since the last pass, modulo 256
  uint32_t samples = 0;    // digest of samples of their values (ReplicaWatch)
};

// trailer: (kTrailerNumel), any floating-point dtype.
void write_trailer(const at::Tensor& trailer, const TrailerWord& word);

// After the reduction: some rank has news, or the wrappers, the positions, the numbers of writes
// or the samples differ. The same on all ranks.
bool trailer_needs_attention(const at::Tensor& trailer);

}  // namespace cadre::reduction
