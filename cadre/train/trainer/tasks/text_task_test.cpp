// Tests how a text is divided into training and held-out data, and the text that is generated. A
// rule for the next token takes the place of a model.
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <memory>
#include <string>

#include "cadre/core/os/system.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/train/data/text_corpus.h"
#include "cadre/train/trainer/tasks/task.h"

namespace cadre::train {
namespace {

using ::testing::HasSubstr;

// The text has 39 letters, which is 40 tokens with <|endoftext|>.
class TextTaskTest : public ::testing::Test {
 protected:
  TextTaskTest() {
    std::ofstream(folder_.file("text")) << std::string(39, 'x');
    config_.data.path = folder_.file("text");
    config_.data.held_out = 0.25;
    config_.model.context = 4;
    config_.run.evaluate_tokens = 9;
    config_.sample = {.tokens = 5, .prompt = "ab", .temperature = 0, .top_k = 0};
  }

  std::unique_ptr<Task> task() const {
    return make_text_task(config_, os::make_native_system()->deadline_in(std::chrono::seconds(9)));
  }

  const cadre::testing::TemporaryFolder folder_;
  Config config_;
};

// A model that predicts the next letter of the alphabet after each letter, and <|endoftext|> after
// `last`.
Inference alphabet(char last, int64_t* longest = nullptr) {
  return [last, longest](const at::Tensor& tokens) {
    const int64_t length = tokens.size(1);
    if (longest != nullptr) *longest = std::max(*longest, length);
    at::Tensor logits = at::zeros({1, length, kVocabularySize});
    for (int64_t place = 0; place < length; ++place) {
      const auto token = tokens[0][place].item<int64_t>();
      logits[0][place][token == last ? kEndOfText : (token + 1) % kEndOfText] = 1;
    }
    return logits;
  };
}

TEST_F(TextTaskTest, TheEndOfTheTextIsHeldOut) {
  const auto task = this->task();
  EXPECT_EQ(task->training_data()->size(), 7)
      << "29 of the 30 tokens have a predecessor; each sample predicts 4 of them";
  EXPECT_EQ(task->held_out_data()->size(), 2)
      << "2 samples predict 8 of the 9 tokens that have a predecessor";
  EXPECT_EQ(task->data_identity().size, 40);
  EXPECT_EQ(task->data_text(), "30 tokens of 1 files");
  EXPECT_EQ(task->items_per_sample(), 4);
  EXPECT_NEAR(*task->bigram_entropy(), 0, 1e-12);
}

TEST_F(TextTaskTest, APartWithoutASampleIsRefused) {
  config_.model.context = 16;
  EXPECT_THAT(cadre::testing::failure_of([&] { (void)task(); }),
              HasSubstr("the held-out text has 10 tokens, but one sample takes model.context + 1, "
                        "which is 17"));
}

TEST_F(TextTaskTest, GeneratesTheMostLikelyTokensFromTheLastOnes) {
  int64_t longest = 0;
  EXPECT_EQ(task()->sample(alphabet('z', &longest)), "abcdefg");
  EXPECT_EQ(longest, 4) << "the model must get at most model.context tokens";
  EXPECT_EQ(task()->sample(alphabet('d')), "abcd") << "the text must end at <|endoftext|>";
  // There is only one candidate if top_k is 1, so the temperature has no effect.
  config_.sample.temperature = 3;
  config_.sample.top_k = 1;
  EXPECT_EQ(task()->sample(alphabet('z')), "abcdefg");
  config_.sample.tokens = 0;
  EXPECT_EQ(task()->sample(alphabet('z')), "");
}

}  // namespace
}  // namespace cadre::train
