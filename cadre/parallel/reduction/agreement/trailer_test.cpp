// Tests what ranks write into the trailer, and what each rank concludes from the sum or the mean of
// the ranks' trailers.
#include "cadre/parallel/reduction/agreement/trailer.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <vector>

namespace cadre::reduction {
namespace {

constexpr int kManyRanks = 1000;

// Returns whether the sum of the trailers shows a difference if rank 0 writes `of_0` and all other
// ranks write `of_others`.
bool trailer_tells(at::ScalarType dtype, double factor, const TrailerWord& of_0,
                   const TrailerWord& of_others) {
  const at::Tensor sum = torch::zeros({kTrailerNumel}, dtype);
  const at::Tensor own = torch::empty_like(sum);
  for (int rank = 0; rank < kManyRanks; ++rank) {
    write_trailer(own, rank == 0 ? of_0 : of_others);
    sum.add_(own * factor);
  }
  return trailer_needs_attention(sum);
}

TEST(Trailer, TellsOneRankFromManyInEveryDtype) {
  for (const at::ScalarType dtype :
       {torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble}) {
    for (const double factor : {1.0, 1.0 / kManyRanks}) {
      for (const StepPosition& same :
           std::vector<StepPosition>{{0, 0, 0}, {1, 0, 1}, {0, 2, 6}, {4, 4, 255}}) {
        EXPECT_FALSE(trailer_tells(dtype, factor, {7, same}, {7, same})) << dtype;
        EXPECT_TRUE(trailer_tells(dtype, factor, {7, same, true}, {7, same})) << dtype;
      }
      EXPECT_TRUE(trailer_tells(dtype, factor, {7, {1, 0, 1}}, {7, {0, 0, 0}})) << dtype;
      EXPECT_TRUE(trailer_tells(dtype, factor, {7, {0, 0, 0}}, {7, {0, 1, 2}})) << dtype;
      EXPECT_TRUE(trailer_tells(dtype, factor, {7, {1, 0, 2}}, {7, {0, 1, 2}})) << dtype;
      EXPECT_TRUE(trailer_tells(dtype, factor, {7, {2, 0, 3}}, {7, {2, 0, 6}})) << dtype;
      EXPECT_TRUE(trailer_tells(dtype, factor, {7, {1, 0, 256}}, {7, {1, 0, 256}}))
          << "256 does not fit into the trailer, so the ranks must exchange counts";
      EXPECT_TRUE(trailer_tells(dtype, factor, {6}, {7})) << dtype;
      EXPECT_TRUE(trailer_tells(dtype, factor, {7}, {.wrapper = 7, .num_writes = 128})) << dtype;
      EXPECT_FALSE(trailer_tells(dtype, factor, {.wrapper = 7, .num_writes = 255},
                                 {.wrapper = 7, .num_writes = 255}))
          << dtype;
      EXPECT_TRUE(trailer_tells(dtype, factor, {7}, {7 | uint32_t{1} << 31})) << dtype;
      for (const uint32_t samples : {uint32_t{1}, uint32_t{1} << 31}) {
        const TrailerWord same = {.wrapper = 7, .samples = samples};
        EXPECT_TRUE(trailer_tells(dtype, factor, {7}, same)) << dtype;
        EXPECT_FALSE(trailer_tells(dtype, factor, same, same)) << dtype;
      }
    }
  }
}

}  // namespace
}  // namespace cadre::reduction
