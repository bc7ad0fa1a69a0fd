// Tests `cadre tune` as a command, with two ranks of this host and a few small sizes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/collective/net/tuning_file.h"
#include "cadre/core/os/files/file.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/tune/tune_options.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(TuneCommand, WritesAFileThatGroupsAccept) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("tuning.toml");
  const auto result = run_cadre(
      {"tune", "--nproc-per-node", "2", "--output", path, "--sizes", "1K,4K", "--repetitions=3"});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  const auto text = os::read_file(path, kMaxTuningFileBytes);
  ASSERT_TRUE(text.ok());
  const TuningFile file = parse_tuning_file(*text).value_or_throw();
  ASSERT_TRUE(file.measured);
  EXPECT_EQ(file.measured->engine, "net");
  EXPECT_EQ(file.measured->hosts, "1x2");
  EXPECT_EQ(file.measured->date.size(), 10U);
  const CrossoverTable defaults;
  for (const auto& [chosen, usual] :
       {std::pair{file.table.all_reduce_ring_bytes, defaults.all_reduce_ring_bytes},
        {file.table.all_gather_ring_bytes, defaults.all_gather_ring_bytes}}) {
    EXPECT_TRUE(chosen == 1024 || chosen == 4096 || chosen == 8192 || chosen == usual) << chosen;
  }
  // Two ranks have no choice here.
  EXPECT_EQ(file.table.broadcast_chain_bytes, defaults.broadcast_chain_bytes);
  EXPECT_EQ(file.table.gather_linear_bytes, defaults.gather_linear_bytes);
  EXPECT_EQ(file.table.chain_segment_bytes, defaults.chain_segment_bytes);
  EXPECT_THAT(
      result.output,
      AllOf(HasSubstr("2 ranks, 1x2 (hosts x ranks), engine net"), HasSubstr("     1.0 KiB "),
            HasSubstr("broadcast: not measured, because between two ranks both"),
            HasSubstr("ring from " + std::to_string(file.table.all_reduce_ring_bytes) + " bytes"),
            HasSubstr("CADRE_TUNING_FILE=" + path + " cadre run"), Not(HasSubstr("[0]"))));
  EXPECT_THAT(result.error, AllOf(HasSubstr("measures all_reduce"), Not(HasSubstr("broadcast"))));
  // Nothing but the file is left in the folder.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

// Three ranks choose in every operation.
TEST(TuneCommand, MeasuresEveryOperationOfThreeRanks) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("tuning.toml");
  const auto result = run_cadre({"tune", "--nproc-per-node", "3", "--output", path, "--sizes",
                                 "1000000", "--repetitions", "1"});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  for (const char* const operation : {"all_reduce", "broadcast", "all_gather", "gather"}) {
    EXPECT_THAT(result.error, HasSubstr(std::string("measures ") + operation));
    EXPECT_THAT(result.output, HasSubstr(std::string("\n") + operation + " "));
  }
}

TEST(TuneCommand, RefusesInvalidCommandLines) {
  struct Case {
    std::vector<std::string> words;
    std::string error;
    int exit_code = kUsageExitCode;
  };
  const testing::TemporaryFolder folder;
  for (const auto& [words, error, exit_code] :
       {Case{{"--sizes", "4K,1K"}, "--sizes 4K,1K: expected ascending sizes from 1K"},
        Case{{"--sizes", "512"}, "expected ascending sizes"},
        Case{{"--sizes", "2048M"}, "expected ascending sizes"},
        Case{{"--sizes", "1K,"}, "expected ascending sizes"},
        Case{{"--repetitions", "0"}, "--repetitions 0: expected a number from 1 to 10000"},
        Case{{"--output", ""}, "expected the name of a file"}, Case{{"--nproc", "0"}, "--nproc"},
        Case{{"./train"}, "\"./train\" is no option"},
        Case{{"-m", "--nproc-per-node", "2"}, "unknown option -m"},
        Case{{"--run-path", "--nproc-per-node", "2"}, "unknown option --run-path"},
        Case{{"--sizs", "1K"}, "--sizs"},
        Case{{"--nproc-per-node", "1"}, "one rank has nothing to measure", 1},
        Case{{"--nproc-per-node", "2", "--output", folder.file("none/file")},
             "the folder " + folder.file("none") + " does not exist",
             1}}) {
    std::vector<std::string> all = words;
    all.insert(all.begin(), "tune");
    const auto result = run_cadre(all);
    EXPECT_EQ(result.exit_code, exit_code) << error;
    EXPECT_THAT(result.error, HasSubstr(error));
    EXPECT_EQ(result.output, "");
  }
}

TEST(TuneCommand, HasAHelp) {
  const auto result = run_cadre({"help", "tune"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.output, AllOf(HasSubstr("--sizes SIZES"), HasSubstr("CADRE_TUNING_FILE")));
}

// The options of both commands may be mixed, spelled with underscores, and abbreviated.
TEST(TuneCommand, GivesItsOwnOptionsToTheRanksAndTheOthersToTheJob) {
  const auto result = run_cadre({"tune", "--nproc_per_node", "2", "--output", "a b", "--sizes=1K",
                                 "--dry-run", "--rep", "4", "--max-restarts", "1"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr("tune-worker '--output=a b' --sizes=1K --repetitions=4\n"));
  EXPECT_THAT(result.output, HasSubstr("RANK=1"));
}

TEST(TuneOptionsWords, DefaultSizesArePowersOfTwo) {
  const auto parse = [](const std::vector<std::string>& words) {
    return parse_tune_options(
               parse_words("cadre tune", kTuneOptions, OtherWords::kAmongOptions, words)
                   .value_or_throw())
        .value_or_throw();
  };
  const TuneOptions options = parse({});
  EXPECT_EQ(options.measured.sizes.size(), 15U);
  EXPECT_EQ(options.measured.sizes.front(), 1024U);
  EXPECT_EQ(options.measured.sizes.back(), uint64_t{16} << 20);
  EXPECT_THAT(parse({"--sizes", "1025,2K,1M"}).measured.sizes, ElementsAre(1025, 2048, 1 << 20));
}

}  // namespace
}  // namespace cadre::cli
