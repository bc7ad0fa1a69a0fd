#include "cadre/launch/cli/log_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace cadre::cli {
namespace {

using launch::Stream;
using launch::StreamRoute;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::StartsWith;

GivenOption log_option(std::string value) {
  return {.name = "--tee", .spelling = "-t", .value = std::move(value)};
}

// Returns the streams of ranks 0 to 2 as digits, or the error.
std::string streams_of(std::string value) {
  const auto choice = parse_streams(log_option(std::move(value)));
  if (!choice.ok()) return choice.error().message();
  std::string digits;
  for (int rank = 0; rank < 3; ++rank) {
    const launch::StreamSet set = choice->of(rank);
    digits += std::to_string((set.has_output ? 1 : 0) + (set.has_error ? 2 : 0));
  }
  return digits;
}

TEST(LogOptions, StreamsAreOneDigitForAllOrForEachRank) {
  EXPECT_EQ(streams_of(""), "000");
  EXPECT_EQ(streams_of("0"), "000");
  EXPECT_EQ(streams_of("1"), "111");
  EXPECT_EQ(streams_of("2"), "222");
  EXPECT_EQ(streams_of("3"), "333");
  EXPECT_EQ(streams_of("0:1,2:3"), "103");
  EXPECT_EQ(streams_of("12:1,1:2"), "020");
  for (const char* wrong : {"4", "01", "-1", "1:4", "a:1", "1:", ":1", "0:1,", "0:1 1:2", "out"}) {
    EXPECT_THAT(streams_of(wrong), StartsWith(std::string("-t ") + wrong + ": expected 0 (no"));
  }
}

TEST(LogOptions, LocalRanksAreNumbersBetweenCommas) {
  EXPECT_THAT(*parse_local_ranks(log_option("")), IsEmpty());
  EXPECT_THAT(*parse_local_ranks(log_option("0,12,3")), ElementsAre(0, 12, 3));
  for (const char* wrong : {"0,", "-1", "a", "0;1", " 1"}) {
    EXPECT_FALSE(parse_local_ranks(log_option(wrong)).ok()) << wrong;
  }
}

TEST(LogOptions, TwoCommasAreOneCommaOfAText) {
  EXPECT_THAT(*parse_filters(log_option("")), IsEmpty());
  EXPECT_THAT(*parse_filters(log_option("loss")), ElementsAre("loss"));
  EXPECT_THAT(*parse_filters(log_option("loss,grad norm")), ElementsAre("loss", "grad norm"));
  EXPECT_THAT(*parse_filters(log_option("a,,b,c")), ElementsAre("a,b", "c"));
  EXPECT_THAT(*parse_filters(log_option(",,")), ElementsAre(","));
  EXPECT_FALSE(parse_filters(log_option("a,")).ok());
  EXPECT_FALSE(parse_filters(log_option(",a")).ok());
}

TEST(LogOptions, ALocalRankThatTheHostLacksIsRefused) {
  launch::LogSpec logs;
  logs.shown_ranks = {0, 2};
  EXPECT_TRUE(check_local_ranks(logs, 3).ok());
  EXPECT_EQ(check_local_ranks(logs, 2).error().message(),
            "--local-ranks-filter: there is no local rank 2; this host has 2 workers");
  logs.shown_ranks.clear();
  logs.tees = *parse_streams(log_option("1:3"));
  EXPECT_EQ(check_local_ranks(logs, 1).error().message(),
            "--tee: there is no local rank 1; this host has 1 worker");
}

// The table is that of DefaultLogsSpecs.reify() in torch 2.13.
TEST(LogSpec, RoutesStreamsAsTorchrun) {
  launch::LogSpec logs;
  logs.redirects = *parse_streams(log_option("0:3,1:1"));
  logs.tees = *parse_streams(log_option("1:3"));
  logs.shown_ranks = {0, 1};
  constexpr StreamRoute kFile{.is_shown = false, .is_kept = true};
  constexpr StreamRoute kBoth{.is_shown = true, .is_kept = true};
  constexpr StreamRoute kDropped{.is_shown = false, .is_kept = false};
  EXPECT_EQ(logs.route(Stream::kOutput, 0), kFile);
  EXPECT_EQ(logs.route(Stream::kError, 0), kFile);
  EXPECT_EQ(logs.route(Stream::kOutput, 1), kBoth);  // --tee wins over --redirects
  EXPECT_EQ(logs.route(Stream::kError, 1), kBoth);
  EXPECT_EQ(logs.route(Stream::kOutput, 2), kDropped);
  logs.shown_ranks = {2};
  EXPECT_EQ(logs.route(Stream::kOutput, 1), kFile);
  EXPECT_EQ(logs.route(Stream::kOutput, 2), StreamRoute());
  logs.folder = launch::LogSpec::kNoFolder;
  EXPECT_FALSE(logs.has_files());
  EXPECT_EQ(logs.route(Stream::kOutput, 0), kDropped);
}

}  // namespace
}  // namespace cadre::cli
