#include "cadre/core/schedule/timeline_svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/schedule/timeline_text.h"

namespace cadre {
namespace {

// Pixels.
constexpr double kLabelWidth = 70;
constexpr double kNoteWidth = 190;
constexpr double kTop = 56;
constexpr double kRowHeight = 38;
constexpr double kBoxHeight = 30;
constexpr double kMinPlotWidth = 620;
constexpr double kMaxPlotWidth = 6000;
constexpr double kMinBoxWidth = 20;
constexpr double kDigitWidth = 7;
constexpr double kMinTickDistance = 48;
constexpr double kLegendHeight = 64;

struct Colour {
  int red, green, blue;
};

// By the numbers of PipelineActionKind: F, B, I, W.
constexpr std::array<Colour, 4> kColours{
    {{76, 132, 214}, {58, 158, 98}, {86, 190, 176}, {240, 166, 60}}};
constexpr std::array<std::string_view, 4> kKindTexts{"F forward", "B backward", "I input gradient",
                                                     "W weight gradient"};

std::string colour_text(PipelineActionKind kind, double lightness) {
  const Colour& colour = kColours[static_cast<size_t>(kind)];
  const auto mixed = [lightness](int part) {
    return static_cast<int>(std::lround(part + (255 - part) * lightness));
  };
  return cadre::format("#{:02x}{:02x}{:02x}", mixed(colour.red), mixed(colour.green),
                       mixed(colour.blue));
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else if (c == '>') {
      result += "&gt;";
    } else if (static_cast<uint8_t>(c) >= ' ') {
      result += c;
    }
  }
  return result;
}

// 1, 2 or 5 times a power of ten.
double round_step(double at_least) {
  const double power = std::pow(10, std::floor(std::log10(at_least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= at_least) return factor * power;
  }
  return 10 * power;
}

class Picture {
 public:
  Picture(const PipelineSchedule& schedule, const PipelineTimeline& timeline)
      : schedule_(schedule), timeline_(timeline) {
    double shortest = timeline.makespan_ms;
    for (const auto& actions : timeline.ranks) {
      for (const TimedAction& action : actions) {
        const double duration = action.end_ms - action.begin_ms;
        const bool has_box = duration > 0 && !is_message(action.action.kind);
        if (has_box) shortest = std::min(shortest, duration);
      }
    }
    if (timeline.makespan_ms <= 0) return;
    const double wanted = timeline.makespan_ms * kMinBoxWidth / shortest;
    const double scale = std::clamp(wanted, kMinPlotWidth, kMaxPlotWidth) / timeline.makespan_ms;
    if (std::isfinite(scale)) pixels_per_ms_ = scale;
  }

  std::string draw(std::string_view title) {
    const double plot_bottom = kTop + kRowHeight * schedule_.num_ranks();
    const double width = x_of(timeline_.makespan_ms) + kNoteWidth;
    text_ = cadre::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
        "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"sans-serif\" font-size=\"12\">\n"
        "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        width, plot_bottom + kLegendHeight);
    add_text(kLabelWidth, 20, "font-size=\"15\" font-weight=\"bold\"", escaped(title));
    draw_axis(plot_bottom);
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) draw_rank(rank);
    draw_legend(plot_bottom + 40);
    return std::move(text_) + "</svg>\n";
  }

 private:
  double x_of(double ms) const { return kLabelWidth + ms * pixels_per_ms_; }

  void add_text(double x, double y, std::string_view attributes, std::string_view text) {
    text_ +=
        cadre::format("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, attributes, text);
  }

  void draw_axis(double plot_bottom) {
    if (pixels_per_ms_ == 0) return;
    const double step = round_step(kMinTickDistance / pixels_per_ms_);
    for (int i = 0; i * step <= timeline_.makespan_ms * (1 + 1e-9); ++i) {
      const double x = x_of(i * step);
      text_ += cadre::format(
          "<line x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{0:.1f}\" y2=\"{2:.1f}\" stroke=\"#ccc\"/>\n",
          x, kTop - 6, plot_bottom);
      add_text(x, kTop - 10, "text-anchor=\"middle\" fill=\"#555\"",
               milliseconds_text(i * step) + (i == 0 ? " ms" : ""));
    }
  }

  void draw_rank(int rank) {
    const double y = kTop + kRowHeight * rank + (kRowHeight - kBoxHeight) / 2;
    const double baseline = y + kBoxHeight / 2 + 4;
    add_text(kLabelWidth - 10, baseline, "text-anchor=\"end\"", cadre::format("rank {}", rank));
    text_ += cadre::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"#eee\"/>\n",
        kLabelWidth, y, x_of(timeline_.makespan_ms) - kLabelWidth, kBoxHeight);
    for (const TimedAction& timed : timeline_.ranks[rank]) {
      const auto leaves = leaves_of(timed.action);
      const double height = kBoxHeight / static_cast<double>(leaves.size());
      for (size_t i = 0; i < leaves.size(); ++i) {
        if (is_computation(leaves[i].kind)) {
          draw_box(timed, leaves[i], y + height * static_cast<double>(i), height);
        }
      }
    }
    add_text(x_of(timeline_.makespan_ms) + 12, baseline, "fill=\"#333\"",
             cadre::format("bubble {:.1f} %, {} live", timeline_.bubble_share(rank) * 100,
                           timeline_.peak_live_activations[rank]));
  }

  void draw_box(const TimedAction& timed, const PipelineAction& leaf, double y, double height) {
    const double x = x_of(timed.begin_ms);
    const double width = x_of(timed.end_ms) - x;
    text_ += cadre::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\" "
        "stroke=\"white\"><title>{}: {} to {} ms</title></rect>\n",
        x, y, width, height, colour_text(leaf.kind, lightness_of(leaf.stage)),
        to_text(timed.action), milliseconds_text(timed.begin_ms), milliseconds_text(timed.end_ms));
    const std::string label = std::to_string(*leaf.microbatch);
    if (width < kDigitWidth * static_cast<double>(label.size()) + 2) return;
    add_text(x + width / 2, y + height / 2 + 4, "text-anchor=\"middle\" pointer-events=\"none\"",
             label);
  }

  // 0.15 for the first stage of a rank, rising with those that follow.
  double lightness_of(int stage) const {
    const int pass = stage / schedule_.num_ranks();
    const int num_passes = (schedule_.num_stages() - 1) / schedule_.num_ranks() + 1;
    return 0.15 + 0.55 * pass / std::max(1, num_passes - 1);
  }

  void draw_legend(double y) {
    double x = kLabelWidth;
    for (size_t kind = 0; kind < kColours.size(); ++kind) {
      text_ += cadre::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"14\" height=\"14\" fill=\"{}\"/>\n", x, y - 11,
          colour_text(static_cast<PipelineActionKind>(kind), 0.15));
      add_text(x + 20, y, "", kKindTexts[kind]);
      x += 140;
    }
    add_text(kLabelWidth, y + 18, "fill=\"#555\"",
             schedule_.num_stages() > schedule_.num_ranks()
                 ? "numbers: microbatches; lighter: a later stage of the rank; grey: bubble"
                 : "numbers: microbatches; grey: bubble");
  }

  const PipelineSchedule& schedule_;
  const PipelineTimeline& timeline_;
  double pixels_per_ms_ = 0;
  std::string text_;
};

}  // namespace

std::string timeline_svg(const PipelineSchedule& schedule, const PipelineTimeline& timeline,
                         std::string_view title) {
  return Picture(schedule, timeline).draw(title);
}

}  // namespace cadre
