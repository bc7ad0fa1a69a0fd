#include "cadre/parallel/reduction/agreement/sample_weight.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace cadre::reduction {
namespace {

// The indices of the elements of the first message. Most passes have few forwards; if a rank has
// more than fit, a second message follows.
enum Place : size_t {
  kOwn,
  kSquareOfOwn,
  kIsTooLargeToSquare,
  kNeedsLikeShares,
  kNumCarried,
  kNumBeyond,
  kFirstForward
};
constexpr size_t kNumForwards = 10;
static_assert((kFirstForward + kNumForwards) * sizeof(int64_t) == kSampleMessageBytes);

// The largest number of samples of one rank for which the sum of the squares over all ranks fits
// into 64 bits.
constexpr int64_t kMaxSquared = int64_t{1} << 20;

std::vector<int64_t> summed(const wrap::LocatedGroup& group, std::span<const int64_t> own,
                            size_t size) {
  const at::Tensor sums = at::zeros({static_cast<int64_t>(size)}, at::kLong);
  std::ranges::copy(own, sums.mutable_data_ptr<int64_t>());
  group.all_reduce(sums, ReduceOp::kSum);
  return {sums.const_data_ptr<int64_t>(), sums.const_data_ptr<int64_t>() + size};
}

// Uses that the numbers of all ranks are equal if and only if the mean of their squares equals the
// square of their mean.
bool are_equal_on_all(std::span<const int64_t> sums, int64_t world_size) {
  const int64_t mean = sums[kOwn] / world_size;
  return sums[kIsTooLargeToSquare] == 0 && sums[kOwn] % world_size == 0 &&
         sums[kSquareOfOwn] == mean * mean * world_size;
}

// Returns whether a / b == c / d, without a product that could overflow. If a denominator is 0, the
// shares count as equal.
bool are_equal_shares(int64_t a, int64_t b, int64_t c, int64_t d) {
  if (b == 0 || d == 0) return true;
  const int64_t left = std::gcd(a, b);
  const int64_t right = std::gcd(c, d);
  return a / left == c / right && b / left == d / right;
}

}  // namespace

SampleWeight equal_weight(const wrap::LocatedGroup& group) {
  return {.weight = 1.0 / group.world_size(), .is_equal_on_all = true};
}

std::optional<SampleWeight> agree_on_weight(const wrap::LocatedGroup& group,
                                            const PassSamples& own) {
  const std::span<const int64_t> forwards = own.of_forwards;
  const size_t num_here = std::min(forwards.size(), kNumForwards);
  const int64_t num_first = forwards.empty() ? 0 : forwards[0];
  const bool needs_like_shares =
      own.num_accumulated > 0 ||
      std::ranges::any_of(forwards, [num_first](int64_t count) { return count != num_first; });
  std::vector<int64_t> message(kFirstForward);
  message[kOwn] = own.num_accumulated + num_first;
  const bool is_too_large = message[kOwn] > kMaxSquared;
  message[kSquareOfOwn] = is_too_large ? 0 : message[kOwn] * message[kOwn];
  message[kIsTooLargeToSquare] = is_too_large ? 1 : 0;
  message[kNeedsLikeShares] = needs_like_shares ? 1 : 0;
  message[kNumCarried] = static_cast<int64_t>(forwards.size());
  message[kNumBeyond] = static_cast<int64_t>(forwards.size() - num_here);
  message.insert(message.end(), forwards.begin(), forwards.begin() + num_here);
  std::vector<int64_t> sums = summed(group, message, kFirstForward + kNumForwards);
  if (sums[kNumBeyond] > 0) {
    const auto num_beyond = static_cast<size_t>(sums[kNumBeyond]);
    const std::vector<int64_t> rest = summed(group, forwards.subspan(num_here), num_beyond);
    sums.insert(sums.end(), rest.begin(), rest.end());
  }
  if (sums[kOwn] == 0) {
    // No rank has a forward in this pass: the program has set the gradients itself.
    if (sums[kNumCarried] == 0) return equal_weight(group);
    return std::nullopt;
  }
  SampleWeight result{
      .weight = static_cast<double>(message[kOwn]) / static_cast<double>(sums[kOwn]),
      .is_equal_on_all = are_equal_on_all(sums, group.world_size())};
  if (sums[kNeedsLikeShares] == 0) {
    result.needed_of_others = num_first;
    return result;
  }
  if (forwards.size() < 2) return result;
  for (size_t i = 0; i < forwards.size(); ++i) {
    if (are_equal_shares(forwards[i], sums[kFirstForward + i], message[kOwn], sums[kOwn])) continue;
    result.unlike = i;
    break;
  }
  return result;
}

}  // namespace cadre::reduction
