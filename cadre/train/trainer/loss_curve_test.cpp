#include "cadre/train/trainer/loss_curve.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace cadre::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

LossCurve falling(int num_points) {
  LossCurve curve;
  for (int i = 0; i < num_points; ++i) curve.training.push_back({i + 1, 5.0 - i});
  return curve;
}

TEST(LossCurve, EveryColumnIsABarOfItsHeight) {
  // The plot has two rows, so the four bars are 16, 11, 6 and 1 eighths of a row high.
  EXPECT_THAT(plot_lines(falling(4), {.columns = 72, .rows = 2}),
              ElementsAre("  5.00 █▃", "  2.00 ██▆▁", "       step 1 4"));
}

TEST(LossCurve, AColumnIsTheMeanOfItsSteps) {
  // The plot has eight columns for 16 steps, so each column is the mean of two steps.
  const std::vector<std::string> lines = plot_lines(falling(16), {.columns = 0, .rows = 2});
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_THAT(lines[0], ::testing::StartsWith("  4.50 █"));
  EXPECT_THAT(lines[1], HasSubstr(" -9.50 ██"));
  EXPECT_EQ(plot_line(falling(16), 8), "loss 4.50 █▇▆▅▄▃▂▁ -9.50");
}

TEST(LossCurve, LossesThatAreNoNumbersAreLeftOut) {
  LossCurve curve = falling(2);
  curve.training.push_back({3, std::nan("")});
  curve.training.push_back({4, std::numeric_limits<double>::infinity()});
  EXPECT_EQ(plot_line(curve, 10), "loss 5.00 █▁ 4.00");
  EXPECT_THAT(plot_svg(curve, "a"), Not(HasSubstr("nan")));
}

TEST(LossCurve, OfFewerThanTwoStepsThereIsNone) {
  EXPECT_THAT(plot_lines(falling(1), {}), IsEmpty());
  EXPECT_EQ(plot_line(falling(1), 10), "");
  EXPECT_THAT(plot_svg({}, "a"), HasSubstr("</svg>"));
}

TEST(LossCurve, EqualLossesAreALine) {
  LossCurve curve;
  curve.training = {{1, 2.0}, {2, 2.0}, {3, 2.0}};
  EXPECT_EQ(plot_line(curve, 10), "loss 2.00 ▅▅▅ 2.00");
}

TEST(LossCurve, ThePictureHasBothCurvesAndAnEscapedTitle) {
  LossCurve curve = falling(3);
  curve.held_out = {{3, 4.0}};
  const std::string svg = plot_svg(curve, "a<b & c");
  EXPECT_THAT(svg, HasSubstr(">a&lt;b &amp; c: loss by step<"));
  // The curve goes from step 1 with loss 5 (upper left) to step 3 with loss 3 (lower right); the
  // plot's corners are at (56, 40) and (624, 324).
  EXPECT_THAT(svg, HasSubstr("points=\"56.0,40.0 340.0,182.0 624.0,324.0\""));
  EXPECT_THAT(svg, HasSubstr("<circle cx=\"624.0\" cy=\"182.0\""));
}

}  // namespace
}  // namespace cadre::train
