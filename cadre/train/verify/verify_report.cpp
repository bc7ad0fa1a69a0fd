#include "cadre/train/verify/verify_report.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

constexpr size_t kNumberWidth = 12;

std::string left(std::string_view text, size_t width) {
  return std::string(text) + std::string(width > text.size() ? width - text.size() : 0, ' ');
}

std::string right(std::string_view text, size_t width) {
  return std::string(width > text.size() ? width - text.size() : 0, ' ') + std::string(text);
}

std::string number(double value) {
  return value == 0 ? "0" : format("{:.1e}", value);
}

std::string explain(std::string_view what, const Deviation& deviation) {
  const std::string of = deviation.name.empty() ? "" : format(" of \"{}\"", deviation.name);
  return format("    {}{} in step {} on rank {}: {} from the reference, bound {}\n", what, of,
                deviation.step, deviation.rank, number(deviation.difference),
                number(deviation.bound));
}

std::string_view verdict_of(const StrategyReport& report) {
  if (!report.not_run.empty()) return "not run";
  if (!report.error.empty()) return "failed";
  return report.is_within() ? "within the bounds" : "deviates";
}

}  // namespace

bool Deviation::is_within() const {
  return difference <= bound;
}

bool StrategyReport::is_within() const {
  if (!error.empty() || !not_run.empty()) return false;
  const auto is_compared = [](const Deviation& deviation) {
    return deviation.step > 0 && deviation.is_within();
  };
  return is_compared(loss) && is_compared(gradients) && is_compared(parameters) &&
         buffers.is_within();
}

bool VerifyReport::is_within() const {
  return !strategies.empty() && std::ranges::all_of(strategies, &StrategyReport::is_within);
}

std::string VerifyReport::to_text() const {
  size_t width = std::string_view("strategy").size();
  for (const StrategyReport& report : strategies) width = std::max(width, report.strategy.size());
  const bool has_buffers = std::ranges::any_of(
      strategies, [](const StrategyReport& report) { return report.buffers.step > 0; });
  std::string text = left("strategy", width);
  for (const char* column : {"loss", "gradients", "parameters"}) {
    text += right(column, kNumberWidth);
  }
  if (has_buffers) text += right("buffers", kNumberWidth);
  text += "  verdict\n";
  for (const StrategyReport& report : strategies) {
    text += left(report.strategy, width);
    std::vector<const Deviation*> columns{&report.loss, &report.gradients, &report.parameters};
    if (has_buffers) columns.push_back(&report.buffers);
    for (const Deviation* deviation : columns) {
      text += right(deviation->step == 0 ? "-" : number(deviation->difference), kNumberWidth);
    }
    text += format("  {}\n", verdict_of(report));
    for (const std::string* reason : {&report.error, &report.not_run}) {
      if (!reason->empty()) text += format("    {}\n", *reason);
    }
    if (!report.loss.is_within()) text += explain("loss", report.loss);
    if (!report.gradients.is_within()) text += explain("gradient", report.gradients);
    if (!report.parameters.is_within()) text += explain("parameter", report.parameters);
    if (!report.buffers.is_within()) text += explain("buffer", report.buffers);
  }
  return text;
}

}  // namespace cadre
