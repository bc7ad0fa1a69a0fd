#include "cadre/launch/cli/doctor/finding.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/launch/cli/command.h"

namespace cadre::cli {
namespace {

// The columns of the state, the name and the text.
constexpr std::string_view kTextIndent = "                              ";

std::string_view word_of(FindingState state) {
  switch (state) {
    case FindingState::kOk:
      return "ok";
    case FindingState::kNote:
      return "note";
    case FindingState::kProblem:
      return "problem";
  }
  return "";
}

// Source: ECMA-48, select graphic rendition.
std::string_view colour_of(FindingState state) {
  switch (state) {
    case FindingState::kOk:
      return "\033[32m";  // green
    case FindingState::kNote:
      return "\033[33m";  // yellow
    case FindingState::kProblem:
      return "\033[31m";  // red
  }
  return "";
}

int64_t count_of(const std::vector<Finding>& findings, FindingState state) {
  return std::ranges::count(findings, state, &Finding::state);
}

std::string plural(int64_t count, std::string_view noun) {
  return cadre::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::string lines_of(const Finding& finding, const TableOptions& options) {
  std::string state = cadre::format("{:<7}", word_of(finding.state));
  if (options.has_colour) state = cadre::format("{}{}\033[0m", colour_of(finding.state), state);
  // The first line of the text stands behind the state and the name instead of the indent.
  std::string text = wrapped(printable(finding.seen), kTextIndent);
  text = cadre::format("  {}  {:<18} ", state, finding.name) + text.substr(kTextIndent.size());
  if (finding.state == FindingState::kOk) return text;
  if (!finding.meaning.empty()) text += wrapped(printable(finding.meaning), kTextIndent);
  // A command stays on one line, so that it can be copied.
  if (!finding.remedy.empty()) {
    text += cadre::format("{}$ {}\n", kTextIndent, printable(finding.remedy));
  }
  return text;
}

// Bytes that are not UTF-8, as in a file name, would make dump() throw.
constexpr auto kReplaceInvalid = nlohmann::ordered_json::error_handler_t::replace;

}  // namespace

std::string to_table(const std::vector<Finding>& findings, const TableOptions& options) {
  std::string text;
  std::string_view section;
  for (const Finding& finding : findings) {
    if (finding.section != section) {
      text += cadre::format("{}{}\n", section.empty() ? "" : "\n", finding.section);
      section = finding.section;
    }
    text += lines_of(finding, options);
  }
  const int64_t num_problems = count_of(findings, FindingState::kProblem);
  return text + cadre::format("\n{}: {}, {}\n",
                              plural(static_cast<int64_t>(findings.size()), "finding"),
                              plural(num_problems, "problem"),
                              plural(count_of(findings, FindingState::kNote), "note"));
}

std::string to_json(const std::vector<Finding>& findings) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Finding& finding : findings) {
    nlohmann::ordered_json entry{{"section", finding.section},      {"name", finding.name},
                                 {"state", word_of(finding.state)}, {"seen", finding.seen},
                                 {"meaning", finding.meaning},      {"remedy", finding.remedy}};
    for (const auto& [name, value] : finding.numbers) entry["numbers"][name] = value;
    list.push_back(std::move(entry));
  }
  const nlohmann::ordered_json report{{"version", CADRE_VERSION},
                                      {"num_problems", count_of(findings, FindingState::kProblem)},
                                      {"num_notes", count_of(findings, FindingState::kNote)},
                                      {"findings", std::move(list)}};
  return report.dump(2, ' ', false, kReplaceInvalid) + "\n";
}

int exit_code_of(const std::vector<Finding>& findings) {
  return count_of(findings, FindingState::kProblem) == 0 ? 0 : 1;
}

}  // namespace cadre::cli
