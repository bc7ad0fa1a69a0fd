#include "cadre/parallel/buckets/bucket_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "cadre/core/base/random.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using Sizes = std::vector<ParameterSize>;

TEST(BucketLayout, FillsTheFirstBucketToItsCapThenTheOthers) {
  const Sizes sizes(6, {.sizes = {25}});  // six float32 parameters of 100 bytes each
  const std::vector<int64_t> order = {5, 4, 3, 2, 1, 0};
  const BucketLayout layout = plan_bucket_layout(sizes, order, {.first_bytes = 100, .bytes = 200});
  EXPECT_EQ(layout.to_string(), "float32:5;float32:4,3;float32:2,1;float32:0");
}

TEST(BucketLayout, KeepsDTypesApartAndBucketsInOrderOfCompletion) {
  const Sizes sizes = {
      {.sizes = {10}}, {.sizes = {2, 5}, .dtype = DType::kFloat64}, {.sizes = {10}}};
  const BucketLayout layout = plan_bucket_layout(sizes, std::vector<int64_t>{0, 1, 2}, {});
  EXPECT_EQ(layout.to_string(), "float64:1;float32:0,2");
}

TEST(BucketLayout, EveryPlanFitsAndSurvivesItsText) {
  constexpr uint64_t kSeed = 20261121;
  Random random(kSeed);
  for (int round = 0; round < 300; ++round) {
    Sizes sizes(1 + random.below(40));
    for (ParameterSize& size : sizes) {
      size.dtype = random.below(4) == 0 ? DType::kFloat64 : DType::kFloat32;
      size.sizes = {static_cast<int64_t>(random.below(1000))};
    }
    std::vector<int64_t> order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    const BucketCaps caps{.first_bytes = static_cast<int64_t>(random.below(4000)),
                          .bytes = static_cast<int64_t>(random.below(9000))};
    const BucketLayout layout = plan_bucket_layout(sizes, order, caps);
    EXPECT_NO_THROW(check_layout_fits(layout, sizes)) << "seed " << kSeed << ", round " << round;
    EXPECT_EQ(BucketLayout::parse(layout.to_string()), layout);
  }
}

TEST(BucketLayout, RefusesMalformedTexts) {
  for (const char* text : {"x", "float32", "float32:", "float33:1", "float32:1,", "float32:-1",
                           "float32:1;", "float32:1;;float32:2", "float32:1 ", "float32:a",
                           "float32:99999999999999999999", ";", ":1"}) {
    EXPECT_THAT(testing::failure_of([&] { BucketLayout::parse(text); }),
                ::testing::StartsWith("kCorruption: "))
        << text;
  }
  EXPECT_TRUE(BucketLayout::parse("").buckets.empty());
}

TEST(BucketLayout, NamesWhatDoesNotFitTheModel) {
  const Sizes sizes = {{.sizes = {10}}, {.sizes = {10}, .dtype = DType::kFloat64}};
  const auto problem = [&](const char* text) {
    return testing::failure_of([&] { check_layout_fits(BucketLayout::parse(text), sizes); });
  };
  EXPECT_EQ(problem("float32:0;float64:1"), "");
  EXPECT_NE(problem("float32:0").find("the layout has 1 parameters, but the model has 2"),
            std::string::npos);
  EXPECT_NE(problem("float32:0,0;float64:1").find("is in the layout twice"), std::string::npos);
  EXPECT_NE(
      problem("float32:0,1").find("parameter 1 has the dtype float64, but its bucket has float32"),
      std::string::npos);
  EXPECT_NE(
      problem("float32:0,2;float64:1").find("the layout has parameter 2, but the model has only 2"),
      std::string::npos);
}

}  // namespace
}  // namespace cadre
