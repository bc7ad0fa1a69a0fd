#include "cadre/parallel/ddp/trailer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "cadre/buckets/gradient_buckets.h"

namespace cadre {

namespace {

constexpr int kBitsPerCount = 3;
constexpr int32_t kMaxCount = (1 << kBitsPerCount) - 1;
constexpr int kNumPairs = 2 * kBitsPerCount;
static_assert(GradientBuckets::kTrailerNumel == 2 * kNumPairs + 1);

}  // namespace

void write_trailer(const at::Tensor& trailer, const StepPosition& position, bool has_news) {
  const at::NoGradGuard no_grad;
  const int32_t older = std::min(position.num_older, kMaxCount);
  const int32_t newer = std::min(position.num_newer, kMaxCount);
  const int32_t bits = older << kBitsPerCount | newer;
  const at::Tensor values = at::zeros({GradientBuckets::kTrailerNumel}, at::kDouble);
  double* element = values.mutable_data_ptr<double>();
  for (int pair = 0; pair < kNumPairs; ++pair) element[2 * pair + (bits >> pair & 1)] = 1;
  // A count that has no room is compared by the counts that follow on news.
  if (has_news || older == kMaxCount || newer == kMaxCount) element[2 * kNumPairs] = 1;
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

}  // namespace cadre
