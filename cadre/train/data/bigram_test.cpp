#include "cadre/train/data/bigram.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <string>
#include <utility>

#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::bigram_test {
namespace {

// Matches a kInvalidArgument whose message contains `part`.
auto refusal(const char* part) {
  return ::testing::AllOf(::testing::StartsWith("kInvalidArgument: "), ::testing::HasSubstr(part));
}

class BigramTest : public ::testing::Test {
 protected:
  TextCorpus corpus_of(const std::string& text) const {
    std::ofstream(folder_.file("text"), std::ios::binary) << text;
    return TextCorpus::open(folder_.file("text"));
  }

  const testing::TemporaryFolder folder_;
};

TEST_F(BigramTest, EntropyOfKnownTexts) {
  // Each letter is always followed by the same one, so the entropy is 0.
  EXPECT_NEAR(bigram_conditional_entropy(corpus_of("abababababababab"), {0, 16}), 0.0, 1e-12);
  // Each letter of "aabbaabb..." is followed by a and b equally often.
  std::string text = "a";
  for (int i = 0; i < 1000; ++i) text += "abba";
  EXPECT_NEAR(bigram_conditional_entropy(corpus_of(text), {0, 4001}), std::log(2.0), 1e-6);
}

TEST_F(BigramTest, RangesOutsideOfTheTextAreRefused) {
  const TextCorpus corpus = corpus_of("abcdefgh");
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{-1, 4}, {0, 10}, {5, 4}, {3, 4}}) {
    EXPECT_THAT(testing::failure_of([&] {
                  bigram_conditional_entropy(corpus, {begin, end});
                }),
                refusal("of 9; expected at least two tokens"));
  }
}

}  // namespace
}  // namespace cadre::bigram_test
