#include "cadre/core/collective/net/tuning_file.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/random.h"

namespace cadre {
namespace {

const TuningFile kMeasured{
    .table = {.all_reduce_ring_bytes = 1,
              .broadcast_chain_bytes = 2,
              .all_gather_ring_bytes = 3,
              .chain_segment_bytes = 4096,
              .gather_linear_bytes = kMaxCrossoverBytes},
    .measured = TuningOrigin{"hierarchical", "2x4,1x3", "2026-11-28", "0.1.0"}};

// Written by hand from docs/formats/tuning-file.md.
constexpr std::string_view kByHand =
    "# our cluster\r\n"
    "version=1 # comment\n"
    "\n"
    "\tgather_linear_bytes = 5\n"
    "chain_segment_bytes = 1073741824\n"
    "all_gather_ring_bytes = 4\n"
    "broadcast_chain_bytes = 3\n"
    "all_reduce_ring_bytes = 2";

std::string error_of(std::string_view text) {
  const auto parsed = parse_tuning_file(text);
  if (parsed.ok()) return "";
  EXPECT_EQ(parsed.error().code(), ErrorCode::kInvalidArgument);
  return std::string(parsed.error().message());
}

// Returns the text of kMeasured with `from` replaced by `to`.
std::string with(std::string_view from, std::string_view to) {
  std::string text = to_text(kMeasured);
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(TuningFileText, SurvivesARoundTrip) {
  EXPECT_EQ(parse_tuning_file(to_text(kMeasured)).value_or_throw(), kMeasured);
  EXPECT_EQ(parse_tuning_file(to_text({})).value_or_throw(), TuningFile{});
}

TEST(TuningFileText, HasTheDocumentedLines) {
  EXPECT_EQ(to_text(kMeasured),
            "# Sizes in bytes from which collectives use their second algorithm.\n"
            "version = 1\n"
            "all_reduce_ring_bytes = 1\n"
            "broadcast_chain_bytes = 2\n"
            "all_gather_ring_bytes = 3\n"
            "gather_linear_bytes = 1099511627776\n"
            "chain_segment_bytes = 4096\n"
            "measured_engine = \"hierarchical\"\n"
            "measured_hosts = \"2x4,1x3\"\n"
            "measured_date = \"2026-11-28\"\n"
            "measured_version = \"0.1.0\"\n");
}

TEST(TuningFileText, IsReadWithCommentsAndInAnyOrder) {
  const TuningFile file = parse_tuning_file(kByHand).value_or_throw();
  EXPECT_EQ(file.table.all_reduce_ring_bytes, 2U);
  EXPECT_EQ(file.table.broadcast_chain_bytes, 3U);
  EXPECT_EQ(file.table.all_gather_ring_bytes, 4U);
  EXPECT_EQ(file.table.gather_linear_bytes, 5U);
  EXPECT_EQ(file.table.chain_segment_bytes, uint64_t{1} << 30);
  EXPECT_FALSE(file.measured);
}

TEST(TuningFileText, ErrorsNameTheLineTheKeyAndWhatWasExpected) {
  using Case = std::pair<std::string, std::string>;
  const std::string value = "line 5: all_gather_ring_bytes is ";
  const std::string expected = ", expected a number of bytes from 1 to 1099511627776";
  const std::string text_error =
      "line 10: measured_date has an invalid value, expected 1 to 256 characters";
  for (const auto& [text, error] : {
           Case{"", "there is no version; is the file complete?"},
           Case{"all_reduce_ring_bytes = 1\n", "line 1: expected \"version = 1\" before"},
           Case{with("version = 1", "version = 2"),
                "line 2: version is 2, but this version of Cadre reads version 1: measure again"},
           Case{with("all_gather_ring_bytes = 3", "all_gather_ring_bytes = 0"),
                value + "0" + expected},
           Case{with("all_gather_ring_bytes = 3", "all_gather_ring_bytes = -3"),
                value + "-3" + expected},
           Case{with("all_gather_ring_bytes = 3", "all_gather_ring_bytes = 3 KiB"),
                value + "3 KiB" + expected},
           Case{with("all_gather_ring_bytes = 3", "all_gather_ring_bytes ="),
                value + "empty" + expected},
           Case{with("all_gather_ring_bytes = 3", "all_gather_ring_bytes = 1099511627777"),
                value + "1099511627777" + expected},
           Case{with("all_gather_ring_bytes = 3", "all_gather_ring_bytes = 18446744073709551617"),
                value + "18446744073709551617" + expected},
           Case{with("chain_segment_bytes = 4096", "chain_segment_bytes = 4095"),
                "expected a number of bytes from 4096 to 1073741824"},
           Case{with("all_gather_ring_bytes", "all_gather_rings_bytes"),
                "line 5: unknown key \"all_gather_rings_bytes\"; did you mean "
                "all_gather_ring_bytes?"},
           Case{with("all_gather_ring_bytes", "\x1b[2J"), "line 5: unknown key \"\\x1b[2J\""},
           Case{with("all_gather_ring_bytes = 3\n", ""), "there is no all_gather_ring_bytes"},
           Case{with("all_gather_ring_bytes = 3", "all_gather_ring_bytes"),
                "line 5: \"all_gather_ring_bytes\", expected KEY = VALUE"},
           Case{with("all_gather_ring_bytes", "all_reduce_ring_bytes"),
                "line 5: all_reduce_ring_bytes is given again, first in line 3"},
           Case{with("measured_date = \"2026-11-28\"\n", ""), "there is no measured_date"},
           Case{with("\"2026-11-28\"", "2026-11-28"), text_error},
           Case{with("\"2026-11-28\"", "\"\""), text_error},
           Case{with("\"2026-11-28\"", "\"a\\n\""), text_error},
           Case{with("\"2026-11-28\"", "\"a\" b"), text_error},
           Case{with("2026-11-28", std::string(257, 'a')), text_error},
           Case{std::string(kMaxTuningFileBytes + 1, '#'), "65537 bytes, expected at most 65536"},
       }) {
    EXPECT_NE(error_of(text).find(error), std::string::npos)
        << "got \"" << error_of(text) << "\", expected \"" << error << "\"";
  }
}

// A file that was cut anywhere is refused, unless only the origin and whole lines are missing.
TEST(TuningFileText, ACutFileIsRefused) {
  const std::string text = to_text(kMeasured);
  const size_t end_of_sizes = text.find("measured_engine");
  for (size_t size = 0; size + 1 < text.size(); ++size) {
    const auto parsed = parse_tuning_file(std::string_view(text).substr(0, size));
    const bool has_sizes_only = size + 1 == end_of_sizes || size == end_of_sizes;
    EXPECT_EQ(parsed.ok(), has_sizes_only) << "the first " << size << " bytes";
  }
}

TEST(TuningFileText, RandomDamageIsRefusedOrGivesSizesWithinTheBounds) {
  const std::string text = to_text(kMeasured);
  Random random(1);
  for (int i = 0; i < 5000; ++i) {
    std::string damaged = text;
    for (int k = 0; k < 3; ++k) {
      damaged[random.below(damaged.size())] = static_cast<char>(random.next());
    }
    const auto parsed = parse_tuning_file(damaged);
    if (!parsed.ok()) continue;
    EXPECT_GE(parsed->table.all_gather_ring_bytes, 1U);
    EXPECT_LE(parsed->table.all_gather_ring_bytes, kMaxCrossoverBytes);
    EXPECT_EQ(parse_tuning_file(to_text(*parsed)).value_or_throw(), *parsed);
  }
}

TEST(HostsText, CountsHostsOfEachNumberOfRanks) {
  EXPECT_EQ(hosts_text(std::vector{0}), "1x1");
  EXPECT_EQ(hosts_text(std::vector{0, 0, 0, 0}), "1x4");
  EXPECT_EQ(hosts_text(std::vector{0, 1, 0, 1}), "2x2");
  EXPECT_EQ(hosts_text(std::vector{0, 1, 1, 2, 2}), "2x2,1x1");
}

}  // namespace
}  // namespace cadre
