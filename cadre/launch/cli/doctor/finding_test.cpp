#include "cadre/launch/cli/doctor/finding.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace cadre::cli {
namespace {

std::vector<Finding> three_findings() {
  return {{.section = "names", .name = "host name", .seen = "node1 is 10.0.0.2", .meaning = "good"},
          {.section = "names",
           .name = "short",
           .state = FindingState::kNote,
           .seen = "a\nb",
           .meaning = "It may be slow."},
          {.section = "limits",
           .name = "open files",
           .state = FindingState::kProblem,
           .seen = "16",
           .meaning = "Jobs fail.",
           .remedy = "ulimit -n 4096",
           .numbers = {{"limit", 16}}}};
}

TEST(DoctorFinding, TheTableIsAlignedAndExplainsNotesAndProblems) {
  EXPECT_EQ(to_table(three_findings(), {}),
            "names\n"
            "  ok       host name          node1 is 10.0.0.2\n"
            "  note     short              a\\x0ab\n"
            "                              It may be slow.\n"
            "\n"
            "limits\n"
            "  problem  open files         16\n"
            "                              Jobs fail.\n"
            "                              $ ulimit -n 4096\n"
            "\n"
            "3 findings: 1 problem, 1 note\n");
  EXPECT_EQ(exit_code_of(three_findings()), 1);
}

TEST(DoctorFinding, ColoursOnlyTheState) {
  const std::vector<Finding> fine{three_findings()[0]};
  EXPECT_EQ(to_table(fine, {.has_colour = true}),
            "names\n  \033[32mok     \033[0m  host name          node1 is 10.0.0.2\n"
            "\n1 finding: 0 problems, 0 notes\n");
  EXPECT_EQ(exit_code_of(fine), 0);
}

TEST(DoctorFinding, JsonHasEveryFieldAndReplacesInvalidBytes) {
  auto findings = three_findings();
  findings[1].seen = "\xff";
  const auto report = nlohmann::json::parse(to_json(findings));
  EXPECT_EQ(report["num_problems"], 1);
  EXPECT_EQ(report["num_notes"], 1);
  EXPECT_EQ(report["findings"].size(), 3U);
  EXPECT_EQ(report["findings"][0]["meaning"], "good");
  EXPECT_EQ(report["findings"][1]["seen"], "\xef\xbf\xbd");
  EXPECT_EQ(report["findings"][2]["numbers"]["limit"], 16);
  EXPECT_EQ(report["findings"][2]["remedy"], "ulimit -n 4096");
}

}  // namespace
}  // namespace cadre::cli
