// Draws the losses of a run as a curve: for a terminal, as one line of text, and as an SVG picture.
//
// Threads: plain functions. Blocking: never. Lifetime: values. Errors: none; losses that are NaN or
// infinite are skipped.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cadre::train {

struct LossPoint {
  int64_t step = 0;
  double loss = 0;
};

// Each list is in ascending order of its steps.
struct LossCurve {
  std::vector<LossPoint> training;
  std::vector<LossPoint> held_out;
};

struct PlotSize {
  int columns = 72;  // the width of the whole line, with the labels of the axis
  int rows = 8;  // the number of rows of the plot, not counting the line with the steps below it
};

// Returns the training loss as bars of Unicode's block elements; each bar is the mean over the
// steps of its column. The lines have no newline at the end. Returns an empty list for fewer than
// two points.
std::vector<std::string> plot_lines(const LossCurve& curve, const PlotSize& size);

// Returns one line such as "loss 5.55 █▅▃▂▁ 1.62" with at most `num_bars` bars; an empty text for
// fewer than two points.
std::string plot_line(const LossCurve& curve, int num_bars);

// Returns an SVG picture of the training and the held-out loss, with axes and a legend. `title` may
// be any UTF-8 text.
std::string plot_svg(const LossCurve& curve, const std::string& title);

}  // namespace cadre::train
