#include "cadre/train/trainer/loss_curve.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>

#include "cadre/core/base/format.h"

namespace cadre::train {
namespace {

// Characters for bars that fill one to eight eighths of a character's height.
constexpr std::array<std::string_view, 8> kBars = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
constexpr int kEighths = 8;
constexpr int kLabelWidth = 7;  // the width of a label such as "  5.55 "
constexpr size_t kMaxPicturePoints = 600;

std::vector<LossPoint> finite(const std::vector<LossPoint>& points) {
  std::vector<LossPoint> kept = points;
  std::erase_if(kept, [](const LossPoint& point) { return !std::isfinite(point.loss); });
  return kept;
}

// Returns at most `count` points. Each has the mean loss of consecutive points, and the step of the
// last of them.
std::vector<LossPoint> averaged(const std::vector<LossPoint>& points, size_t count) {
  count = std::min(count, points.size());
  std::vector<LossPoint> means;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = points.size() * i / count;
    const size_t end = points.size() * (i + 1) / count;
    double sum = 0;
    for (size_t k = begin; k < end; ++k) sum += points[k].loss;
    means.push_back({points[end - 1].step, sum / static_cast<double>(end - begin)});
  }
  return means;
}

struct LossRange {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();

  void add(const std::vector<LossPoint>& points) {
    for (const LossPoint& point : points) {
      low = std::min(low, point.loss);
      high = std::max(high, point.loss);
    }
  }
  // Returns the relative height of a loss: 0 for the lowest and 1 for the highest; 1/2 if all are
  // equal.
  double height(double loss) const { return high > low ? (loss - low) / (high - low) : 0.5; }
};

// Returns the height of a bar in eighths of a row, from 1 to `most`. It is at least 1, so that
// every step is visible.
int eighths_of(double height, int most) {
  return 1 + static_cast<int>(std::lround(height * (most - 1)));
}

// Returns the parts of an SVG picture: axes, curves and texts, in the picture's coordinates.
class Picture {
 public:
  Picture(LossRange range, int64_t first_step, int64_t last_step)
      : range_(range), first_(first_step), last_(last_step) {}

  static constexpr double kWidth = 640;
  static constexpr double kHeight = 360;
  static constexpr double kLeft = 56;
  static constexpr double kRight = 16;
  static constexpr double kTop = 40;
  static constexpr double kBottom = 36;

  double x(int64_t step) const {
    const double width = kWidth - kLeft - kRight;
    if (last_ == first_) return kLeft + width / 2;
    return kLeft + width * static_cast<double>(step - first_) / static_cast<double>(last_ - first_);
  }
  double y(double loss) const {
    return kHeight - kBottom - (kHeight - kTop - kBottom) * range_.height(loss);
  }

  std::string curve(const std::vector<LossPoint>& points, std::string_view color) const {
    std::string line;
    for (const LossPoint& point : points) {
      line +=
          cadre::format("{}{:.1f},{:.1f}", line.empty() ? "" : " ", x(point.step), y(point.loss));
    }
    return cadre::format(
        "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\" points=\"{}\"/>\n", color,
        line);
  }
  std::string dots(const std::vector<LossPoint>& points, std::string_view color) const {
    std::string all;
    for (const LossPoint& point : points) {
      all += cadre::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n",
                           x(point.step), y(point.loss), color);
    }
    return all;
  }

  // Returns both axes, each with five labels.
  std::string axes() const {
    std::string all;
    for (int i = 0; i <= 4; ++i) {
      const double loss = range_.low + (range_.high - range_.low) * i / 4;
      const int64_t step = first_ + (last_ - first_) * i / 4;
      all += cadre::format(
          "<line x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\" stroke=\"#ddd\"/>\n"
          "<text x=\"{3}\" y=\"{4:.1f}\" text-anchor=\"end\">{5:.2f}</text>\n"
          "<text x=\"{6:.1f}\" y=\"{7}\" text-anchor=\"middle\">{8}</text>\n",
          kLeft, kWidth - kRight, y(loss), kLeft - 6, y(loss) + 4, loss, x(step), kHeight - 14,
          step);
    }
    return all;
  }

 private:
  LossRange range_;
  int64_t first_;
  int64_t last_;
};

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
      // XML does not allow other control characters.
    } else if (static_cast<unsigned char>(c) >= ' ') {
      out += c;
    }
  }
  return out;
}

}  // namespace

std::vector<std::string> plot_lines(const LossCurve& curve, const PlotSize& size) {
  const std::vector<LossPoint> points = finite(curve.training);
  if (points.size() < 2) return {};
  const int num_rows = std::max(size.rows, 2);
  const auto num_columns = static_cast<size_t>(std::max(size.columns - kLabelWidth, 8));
  const std::vector<LossPoint> bars = averaged(points, num_columns);
  LossRange range;
  range.add(bars);
  std::vector<std::string> lines;
  for (int row = num_rows - 1; row >= 0; --row) {
    std::string line(kLabelWidth, ' ');
    if (row == num_rows - 1) line = cadre::format("{:6.2f} ", range.high);
    if (row == 0) line = cadre::format("{:6.2f} ", range.low);
    for (const LossPoint& bar : bars) {
      const int eighths = eighths_of(range.height(bar.loss), num_rows * kEighths) - row * kEighths;
      line += eighths <= 0 ? " " : kBars[static_cast<size_t>(std::min(eighths, kEighths) - 1)];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    lines.push_back(std::move(line));
  }
  const std::string first = cadre::format("step {}", points.front().step);
  const std::string last = std::to_string(points.back().step);
  const size_t used = first.size() + last.size();
  const size_t gap = bars.size() > used + 1 ? bars.size() - used : 1;
  lines.push_back(std::string(kLabelWidth, ' ') + first + std::string(gap, ' ') + last);
  return lines;
}

std::string plot_line(const LossCurve& curve, int num_bars) {
  const std::vector<LossPoint> points = finite(curve.training);
  if (points.size() < 2) return "";
  const std::vector<LossPoint> bars = averaged(points, static_cast<size_t>(std::max(num_bars, 2)));
  LossRange range;
  range.add(bars);
  std::string line = cadre::format("loss {:.2f} ", bars.front().loss);
  for (const LossPoint& bar : bars) {
    line += kBars[static_cast<size_t>(eighths_of(range.height(bar.loss), kEighths) - 1)];
  }
  return cadre::format("{} {:.2f}", line, bars.back().loss);
}

std::string plot_svg(const LossCurve& curve, const std::string& title) {
  const std::vector<LossPoint> training = averaged(finite(curve.training), kMaxPicturePoints);
  const std::vector<LossPoint> held_out = finite(curve.held_out);
  LossRange range;
  int64_t first = std::numeric_limits<int64_t>::max();
  int64_t last = std::numeric_limits<int64_t>::min();
  for (const auto* points : {&training, &held_out}) {
    range.add(*points);
    if (points->empty()) continue;
    first = std::min(first, points->front().step);
    last = std::max(last, points->back().step);
  }
  const bool is_empty = first > last;
  const Picture picture(is_empty ? LossRange{.low = 0, .high = 1} : range, is_empty ? 0 : first,
                        is_empty ? 1 : last);
  std::string svg = cadre::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n"
      "<text x=\"{2}\" y=\"20\" font-size=\"14\">{3}: loss by step</text>\n"
      "<text x=\"{4}\" y=\"20\" text-anchor=\"end\"><tspan fill=\"#1f77b4\">training</tspan> "
      "<tspan fill=\"#d62728\">held-out</tspan></text>\n",
      Picture::kWidth, Picture::kHeight, Picture::kLeft, escaped(title),
      Picture::kWidth - Picture::kRight);
  svg += picture.axes();
  svg += picture.curve(training, "#1f77b4");
  svg += picture.curve(held_out, "#d62728") + picture.dots(held_out, "#d62728");
  return svg + "</svg>\n";
}

}  // namespace cadre::train
