#include "cadre/verify/verify_report.h"

#include <algorithm>
#include <string_view>

#include "cadre/base/format.h"

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

}  // namespace

bool Deviation::is_within() const {
  return difference <= bound;
}

bool StrategyReport::is_within() const {
  return error.empty() && loss.is_within() && gradients.is_within() && parameters.is_within();
}

bool VerifyReport::is_within() const {
  return std::ranges::all_of(strategies, &StrategyReport::is_within);
}

std::string VerifyReport::to_text() const {
  size_t width = std::string_view("strategy").size();
  for (const StrategyReport& report : strategies) width = std::max(width, report.strategy.size());
  std::string text = left("strategy", width);
  for (const char* column : {"loss", "gradients", "parameters"}) {
    text += right(column, kNumberWidth);
  }
  text += "  verdict\n";
  for (const StrategyReport& report : strategies) {
    text += left(report.strategy, width);
    for (const Deviation* deviation : {&report.loss, &report.gradients, &report.parameters}) {
      text += right(deviation->step == 0 ? "-" : number(deviation->difference), kNumberWidth);
    }
    text += format("  {}\n", report.is_within()     ? "within the bounds"
                             : report.error.empty() ? "deviates"
                                                    : "failed");
    if (!report.error.empty()) text += format("    {}\n", report.error);
    if (!report.loss.is_within()) text += explain("loss", report.loss);
    if (!report.gradients.is_within()) text += explain("gradient", report.gradients);
    if (!report.parameters.is_within()) text += explain("parameter", report.parameters);
  }
  return text;
}

}  // namespace cadre
