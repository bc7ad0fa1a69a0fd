// Tests that a command line is split into options and other words by the rules of Python's
// argparse.
#include "cadre/launch/cli/option_words.h"

#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

namespace cadre::cli {
namespace {

constexpr std::array kKnown{OptionSpec{"--nproc-per-node", "N"}, OptionSpec{"--nnodes", "N"},
                            OptionSpec{"--tee", "STREAMS", 't'}, OptionSpec{"--module", "", 'm'}};

class OptionWordsTest : public ::testing::Test {
 protected:
  static Result<ParsedWords> parse(const std::vector<std::string>& words,
                                   OtherWords others = OtherWords::kAmongOptions) {
    return parse_words("cadre run", kKnown, others, words);
  }
  // Returns the texts of the options, each followed by "; ", and then the other words.
  static std::string parsed(const std::vector<std::string>& words,
                            OtherWords others = OtherWords::kAmongOptions) {
    const auto result = parse(words, others);
    if (!result.ok()) return result.error().message();
    std::string text;
    for (const GivenOption& option : result->options) text += option.text() + "; ";
    for (const std::string& word : result->others) text += word + " ";
    return text;
  }
};

TEST_F(OptionWordsTest, AValueFollowsAsAWordOrAfterAnEqualSignOrALetter) {
  EXPECT_EQ(parsed({"--nproc-per-node", "4"}), "--nproc-per-node 4; ");
  EXPECT_EQ(parsed({"--nproc_per_node=4"}), "--nproc_per_node 4; ");
  EXPECT_EQ(parsed({"--nproc=-1"}), "--nproc -1; ");
  EXPECT_EQ(parsed({"--nproc", "-1"}), "--nproc -1; ");
  EXPECT_EQ(parsed({"--tee="}), "--tee \"\"; ");
  EXPECT_EQ(parsed({"-t3", "-t", "4", "-m"}), "-t 3; -t 4; -m; ");
}

TEST_F(OptionWordsTest, OtherWordsEndTheOptionsOrAreAmongThem) {
  const std::vector<std::string> words{"-m", "train.py", "--nnodes", "2"};
  EXPECT_EQ(parsed(words), "-m; --nnodes 2; train.py ");
  EXPECT_EQ(parsed(words, OtherWords::kEndTheOptions), "-m; train.py --nnodes 2 ");
  EXPECT_EQ(parsed({"-m", "--", "--nnodes", "2"}), "-m; --nnodes 2 ");
}

TEST_F(OptionWordsTest, TheLastOptionOfANameCounts) {
  const auto result = parse({"--nnodes", "1", "--nnodes", "2", "--tee", "3"});
  ASSERT_TRUE(result.ok());
  ASSERT_NE(result->find("--nnodes"), nullptr);
  EXPECT_EQ(result->find("--nnodes")->value, "2");
  EXPECT_EQ(result->find("--module"), nullptr);
}

TEST_F(OptionWordsTest, WhatIsWrongIsSaidInOneSentence) {
  EXPECT_EQ(parsed({"--n", "3"}), "--n is ambiguous: it may be --nproc-per-node, --nnodes");
  EXPECT_EQ(parsed({"--nnodes"}), "--nnodes needs a value: --nnodes N");
  EXPECT_EQ(parsed({"--nnodes", "--tee"}), "--nnodes needs a value: --nnodes N");
  EXPECT_EQ(parsed({"--module=x"}), "--module=x: --module takes no value");
  EXPECT_EQ(parsed({"--nodes", "3"}), "unknown option --nodes; did you mean --nnodes?");
  EXPECT_EQ(parsed({"-mx"}), "unknown option -mx; cadre run --help lists all");
  EXPECT_EQ(parsed({"-np", "3"}),
            "unknown option -np; for the number of processes use --nproc-per-node");
  EXPECT_EQ(parse({"--nodes"}).error().code(), ErrorCode::kInvalidArgument);
}

TEST_F(OptionWordsTest, AVariableIsNamedWithItsValue) {
  const GivenOption variable{.name = "--tee", .spelling = "PET_TEE", .value = "3"};
  EXPECT_EQ(variable.text(), "PET_TEE=3");
}

TEST_F(OptionWordsTest, AnIntegerIsTheWholeText) {
  EXPECT_EQ(parse_integer("-12"), std::optional<int>(-12));
  for (const char* text : {"", "1x", " 1", "+1", "1.0", "99999999999"}) {
    EXPECT_EQ(parse_integer(text), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace cadre::cli
