#include "cadre/parallel/reduction/agreement/trailer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

namespace cadre::reduction {

namespace {

constexpr int kBitsOfOlder = 3;
constexpr int32_t kMaxOlder = (1 << kBitsOfOlder) - 1;
constexpr int kBitsOfPlaces = 8;
constexpr int kBitsOfPosition = kBitsOfOlder + kBitsOfPlaces;
constexpr int kBitsOfWrapper = 32;
constexpr int kBitsOfWrites = 8;
constexpr int kBitsOfSamples = 32;
constexpr int kNumPairs = kBitsOfPosition + kBitsOfWrapper + kBitsOfWrites + kBitsOfSamples;
static_assert(kTrailerNumel == 2 * kNumPairs + 1);

}  // namespace

void write_trailer(const at::Tensor& trailer, const TrailerWord& word) {
  const at::NoGradGuard no_grad;
  const StepPosition& position = word.position;
  // num_newer is not sent, because the receivers can compute it from the places. A position too
  // large for the trailer is sent as 0; then the ranks compare their positions by the counts
  // (agreement/attention.h).
  const bool has_room = position.num_older <= kMaxOlder && position.places >> kBitsOfPlaces == 0;
  const int32_t place = has_room ? position.num_older << kBitsOfPlaces | position.places : 0;
  const at::Tensor values = at::zeros({kTrailerNumel}, at::kDouble);
  double* element = values.mutable_data_ptr<double>();
  int pair = 0;
  const auto put = [&](uint32_t bits, int num_bits) {
    for (int bit = 0; bit < num_bits; ++bit) element[2 * pair++ + (bits >> bit & 1)] = 1;
  };
  put(static_cast<uint32_t>(place), kBitsOfPosition);
  put(word.wrapper, kBitsOfWrapper);
  put(word.num_writes, kBitsOfWrites);
  put(word.samples, kBitsOfSamples);
  if (word.has_news || !has_room) element[2 * kNumPairs] = 1;
  trailer.copy_(values);
}

bool trailer_needs_attention(const at::Tensor& trailer) {
  const at::Tensor values = trailer.to(at::kDouble).contiguous();
  const double* element = values.const_data_ptr<double>();
  for (int pair = 0; pair < kNumPairs; ++pair) {
    if (element[2 * pair] != 0 && element[2 * pair + 1] != 0) return true;
  }
  return element[2 * kNumPairs] != 0;
}

}  // namespace cadre::reduction
