// The losses of a run as a curve: for a terminal, as one line of text, and as an SVG picture.
//
// Threads: plain functions. Blocking: never. Lifetime: values. Errors: none; losses that are NaN or
// infinite are left out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cadre::train {

struct LossPoint {
  int64_t step = 0;
  double loss = 0;
};

// In ascending order of their steps.
struct LossCurve {
  std::vector<LossPoint> training;
  std::vector<LossPoint> held_out;
};

struct PlotSize {
  int columns = 72;  // width of the whole line, with the labels of the axis
  int rows = 8;      // without the line of steps below
};

// The training loss as bars of Unicode's block elements; each is the mean over the steps of its
// column. Lines without a newline at the end; empty for fewer than two points.
std::vector<std::string> plot_lines(const LossCurve& curve, const PlotSize& size);

// "loss 5.55 █▅▃▂▁ 1.62": the same in one line of at most `num_bars` bars; empty for fewer than two
// points.
std::string plot_line(const LossCurve& curve, int num_bars);

// A picture of both losses with axes and a legend. title: any text in UTF-8.
std::string plot_svg(const LossCurve& curve, const std::string& title);

}  // namespace cadre::train
