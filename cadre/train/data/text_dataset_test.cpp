#include "cadre/train/data/text_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::text_dataset_test {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr int64_t kMost = std::numeric_limits<int64_t>::min();

// Matches a kInvalidArgument whose message contains `part`.
auto refusal(const char* part) {
  return ::testing::AllOf(::testing::StartsWith("kInvalidArgument: "), ::testing::HasSubstr(part));
}

std::string text_of(const std::vector<int64_t>& tokens) {
  std::string text;
  for (const int64_t token : tokens) text += token == kEndOfText ? '|' : static_cast<char>(token);
  return text;
}

class TextDatasetTest : public ::testing::Test {
 protected:
  TextDatasetTest() { std::ofstream(folder_.file("text")) << "abcdefgh"; }

  std::shared_ptr<const TextCorpus> open() const {
    return std::make_shared<const TextCorpus>(TextCorpus::open(folder_.file("text")));
  }

  const testing::TemporaryFolder folder_;
};

TEST_F(TextDatasetTest, SamplesPredictEachTokenOnce) {
  const auto corpus = open();
  // The tokens "bcdefgh|", where "|" is <|endoftext|>.
  const TextDataset dataset(corpus, {1, 9}, 3);
  ASSERT_EQ(dataset.size(), 2);
  const std::vector<int64_t> indices = {1, 0};
  const Batch batch = dataset.get(indices);
  const auto row = [](const at::Tensor& tensor, int64_t i) {
    const at::Tensor plain = tensor[i].contiguous();
    const auto* first = plain.const_data_ptr<int64_t>();
    return text_of({first, first + plain.numel()});
  };
  EXPECT_EQ(row(batch.data, 0), "efg");
  EXPECT_EQ(row(batch.target, 0), "fgh");
  EXPECT_EQ(row(batch.data, 1), "bcd");
  EXPECT_EQ(row(batch.target, 1), "cde");
  EXPECT_THROW(TextDataset(corpus, {0, 3}, 3), Error);
}

TEST_F(TextDatasetTest, NamesWhatIsOutOfRange) {
  const auto corpus = open();
  EXPECT_THAT(testing::failure_of([] {
                TextDataset(nullptr, {0, 9}, 2);
              }),
              refusal("the corpus is null"));
  for (const int64_t context : {int64_t{0}, int64_t{-1}, kMost}) {
    EXPECT_THAT(testing::failure_of([&] {
                  TextDataset(corpus, {0, 9}, context);
                }),
                refusal("expected a context of at least 1"));
  }
  for (const auto& [begin, end] :
       {std::pair<int64_t, int64_t>{-1, 9}, {0, 10}, {8, 2}, {kMost, kHuge}}) {
    EXPECT_THAT(testing::failure_of([&] {
                  TextDataset(corpus, {begin, end}, 2);
                }),
                refusal("a range of the text"));
  }
  EXPECT_THAT(testing::failure_of([&] {
                TextDataset(corpus, {0, 9}, kHuge);
              }),
              refusal("shorter context"));
  TextDataset dataset(corpus, {0, 9}, 2);
  for (const int64_t sample : {int64_t{-1}, int64_t{4}, kHuge}) {
    EXPECT_THAT(testing::failure_of([&] { dataset.get(std::vector{sample}); }),
                refusal("the dataset has 4 samples"));
  }
  const TextDataset taken = std::move(dataset);
  EXPECT_THAT(testing::failure_of([&] { dataset.get(std::vector{int64_t{0}}); }),
              refusal("moved from"));
  EXPECT_THAT(testing::failure_of([&] { dataset.digest(); }), refusal("moved from"));
}

TEST_F(TextDatasetTest, ItsDigestSeesTheTextTheRangeAndTheContext) {
  const auto corpus = open();
  const auto digest = [](const Dataset& dataset) { return dataset.digest().value(); };
  const uint64_t own = digest(TextDataset(corpus, {0, 9}, 2));
  EXPECT_EQ(digest(TextDataset(open(), {0, 9}, 2)), own);
  EXPECT_NE(digest(TextDataset(corpus, {1, 9}, 2)), own);
  EXPECT_NE(digest(TextDataset(corpus, {0, 8}, 2)), own);
  EXPECT_NE(digest(TextDataset(corpus, {0, 9}, 3)), own);
  std::ofstream(folder_.file("text")) << "abcdXfgh";
  EXPECT_NE(digest(TextDataset(open(), {0, 9}, 2)), own);
}

}  // namespace
}  // namespace cadre::text_dataset_test
