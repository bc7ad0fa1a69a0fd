#include "cadre/train/data/tokenizer/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/random.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/train/data/tokens/token_dataset.h"

namespace cadre {
namespace {

using Ids = std::vector<int64_t>;
using ::testing::HasSubstr;

constexpr std::string_view kText =
    "the quick brown fox jumps over the lazy dog. The dog's fox isn't lazy; they've 1234 foxes and "
    "56 dogs!\n\n  Über-naïve façade, 東京 東京 — the fox's 12 dogs'll run.\tthe end the end the "
    "the\n";

Tokenizer trained(const std::vector<std::string>& texts, const TokenizerTrainingOptions& options) {
  size_t next = 0;
  return Tokenizer::train(
      [&]() -> std::optional<std::string> {
        if (next == texts.size()) return std::nullopt;
        return texts[next++];
      },
      options);
}

Tokenizer small_tokenizer() {
  return trained({std::string(kText)}, {.vocabulary_size = 320});
}

std::string refusal_of(const std::function<void()>& call, ErrorCode code) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.message();
    return error.message();
  }
  return "accepted";
}

std::string read_all(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

class TokenizerTest : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& content) const {
    std::ofstream(folder_.file(name), std::ios::binary) << content;
    return folder_.file(name);
  }

  const testing::TemporaryFolder folder_;
};

// The expected values are those of the package tokenizers 0.23.3 of Hugging Face, with a BpeTrainer
// of vocab_size 320 and min_frequency 2 over kText.
TEST_F(TokenizerTest, TrainsAndEncodesAsHuggingFace) {
  const Tokenizer tokenizer = small_tokenizer();
  ASSERT_EQ(tokenizer.vocabulary_size(), 285);
  const std::vector<std::string> merged = {"he",   "the",  " the", " f", "do", "ox", " do",
                                           " fox", " dog", "nd",   "ve", "'s", "12", "az"};
  for (size_t i = 0; i < merged.size(); ++i) {
    EXPECT_EQ(tokenizer.id_of(merged[i]), 257 + static_cast<int64_t>(i));
  }
  const std::vector<std::pair<std::string, Ids>> cases = {
      {"the dog's", {258, 265, 268}},
      {"  the  fox\n\n jumps", {221, 259, 221, 264, 199, 199, 221, 74, 85, 77, 80, 83}},
      {" they'll've'x 12ab34\r\n\t  end  ",
       {259, 89, 7, 76, 76, 7, 267, 7, 88, 277, 65, 66, 19, 20, 202, 199, 198, 221, 278, 221, 221}},
      {"東京の fox — naïve",
       {276, 282, 160, 224, 107, 264, 221, 159, 223, 243, 221, 78, 271, 108, 267}},
      {"<|endoftext|>the<|endoftext|> dog <|endoftext|>", {0, 258, 0, 265, 221, 0}},
      {"", {}},
      {"   ", {221, 221, 221}},
      {"a\u00a0\u2003b\u0301c ٣٤ Ⅷ²", {65,  127, 255, 159, 223, 226, 66,  137, 224, 67, 221,
                                       150, 97,  150, 98,  221, 159, 228, 101, 127, 111}},
      {"don't DON'T ''s", {261, 78, 7, 84, 221, 36, 47, 46, 7, 52, 221, 7, 7, 83}}};
  for (const auto& [text, ids] : cases) {
    EXPECT_EQ(tokenizer.encode(text), ids) << text;
    EXPECT_EQ(tokenizer.decode(ids, {.skip_special_tokens = false}), text);
  }
  EXPECT_EQ(tokenizer.decode(Ids{0, 258, 0, 265, 221, 0}), "the dog ");
}

TEST_F(TokenizerTest, AnyBytesComeBack) {
  const Tokenizer tokenizer = small_tokenizer();
  Random random(7);
  for (int attempt = 0; attempt < 500; ++attempt) {
    std::string bytes;
    const uint64_t kind = random.below(3);
    for (uint64_t size = random.below(60); size > 0; --size) {
      // Single bytes, parts of characters, and parts of the text that was learned.
      if (kind == 0) bytes += static_cast<char>(random.below(256));
      if (kind == 1) bytes += static_cast<char>(0xc0 + random.below(64));
      if (kind == 2) bytes += kText[random.below(kText.size())];
    }
    const Ids ids = tokenizer.encode(bytes);
    EXPECT_EQ(tokenizer.decode(ids, {.skip_special_tokens = false}), bytes);
  }
  // A word of many bytes takes no quadratic time.
  const std::string large(1 << 20, 'x');
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(large)), large);
}

TEST_F(TokenizerTest, ASavedTokenizerIsTheSame) {
  const Tokenizer tokenizer =
      trained({std::string(kText)},
              {.vocabulary_size = 300, .special_tokens = {"<|endoftext|>", "<é>", "<pad>"}});
  const std::string path = folder_.file("tokenizer.json");
  tokenizer.save(path);
  const Tokenizer opened = Tokenizer::open(path);
  EXPECT_EQ(opened.vocabulary_size(), tokenizer.vocabulary_size());
  for (const std::string text : {"the dogs<é>run <pad>", "<|endoftext|>", " é \xff\xfe"}) {
    const Ids ids = tokenizer.encode(text);
    EXPECT_EQ(opened.encode(text), ids);
    EXPECT_EQ(opened.decode(ids, {.skip_special_tokens = false}), text);
    EXPECT_EQ(opened.decode(ids), tokenizer.decode(ids));
  }
  EXPECT_EQ(opened.id_of("<é>"), 1);
  opened.save(folder_.file("again.json"));
  EXPECT_EQ(read_all(folder_.file("again.json")), read_all(path));
}

// A vocabulary of three bytes, their merges, and an added token.
constexpr std::string_view kTiny = R"({"version": "1.0", "truncation": null, "padding": null,
 "added_tokens": [{"id": 6, "content": "<e>", "single_word": false, "lstrip": false,
                   "rstrip": false, "normalized": false, "special": true}],
 "normalizer": null,
 "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
 "post_processor": null, "decoder": {"type": "ByteLevel"},
 "model": {"type": "BPE", "dropout": null, "unk_token": null,
           "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4, "aa": 5},
           "merges": ["a b", ["Ġ", "ab"], "a a"]}})";

TEST_F(TokenizerTest, ReadsTokenizerJson) {
  const Tokenizer tokenizer = Tokenizer::open(write("t.json", std::string(kTiny)));
  EXPECT_EQ(tokenizer.encode("aab ab<e>aaa"), (Ids{0, 3, 4, 6, 5, 0}));
  EXPECT_EQ(tokenizer.vocabulary_size(), 7);
  EXPECT_EQ(tokenizer.id_of("<e>"), 6);
  EXPECT_EQ(tokenizer.id_of("c"), std::nullopt);
  EXPECT_EQ(tokenizer.decode(Ids{4, 6, 5}), " abaa");
  const std::string prefixed =
      replaced(std::string(kTiny), "\"add_prefix_space\": false", "\"add_prefix_space\": true");
  EXPECT_EQ(Tokenizer::open(write("t.json", prefixed)).encode("ab<e> ab"), (Ids{4, 6, 4}));
  EXPECT_THAT(refusal_of([&] { tokenizer.encode("abc"); }, ErrorCode::kInvalidArgument),
              HasSubstr("no token for the byte 0x63 at position 2 of a word of 3 bytes"));
  for (const int64_t id : {int64_t{-1}, int64_t{7}, int64_t{1} << 40}) {
    EXPECT_THAT(refusal_of([&] { tokenizer.decode(Ids{id}); }, ErrorCode::kInvalidArgument),
                HasSubstr("there is no token with the id"));
  }
}

TEST_F(TokenizerTest, WhatIsNotSupportedIsRefusedByName) {
  const auto refusal = [&](std::string_view from, std::string_view to) {
    const std::string path = write("t.json", replaced(std::string(kTiny), from, to));
    return refusal_of([&] { Tokenizer::open(path); }, ErrorCode::kInvalidArgument);
  };
  const auto names = [&](const std::string& path, const std::string& value) {
    return HasSubstr("t.json: " + path + " is " + value + ", which is not supported; expected ");
  };
  EXPECT_THAT(refusal("\"type\": \"BPE\"", "\"type\": \"Unigram\""),
              names("/model/type", "\"Unigram\""));
  EXPECT_THAT(refusal("\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}"),
              names("/normalizer", "{\"type\":\"NFC\"}"));
  EXPECT_THAT(refusal("\"dropout\": null", "\"dropout\": 0.1"), names("/model/dropout", "0.1"));
  EXPECT_THAT(refusal("\"unk_token\": null", "\"unk_token\": \"<unk>\""),
              names("/model/unk_token", "\"<unk>\""));
  EXPECT_THAT(refusal("\"unk_token\": null", "\"ignore_merges\": true"),
              names("/model/ignore_merges", "true"));
  EXPECT_THAT(refusal("\"unk_token\": null", "\"end_of_word_suffix\": \"</w>\""),
              names("/model/end_of_word_suffix", "\"</w>\""));
  EXPECT_THAT(refusal("\"use_regex\": true", "\"use_regex\": false"),
              HasSubstr("/pre_tokenizer is"));
  EXPECT_THAT(refusal("{\"type\": \"ByteLevel\", \"add", "{\"type\": \"Sequence\", \"add"),
              HasSubstr("/pre_tokenizer is"));
  EXPECT_THAT(refusal("\"decoder\": {\"type\": \"ByteLevel\"}", "\"decoder\": null"),
              names("/decoder", "null"));
  EXPECT_THAT(
      refusal("\"post_processor\": null", "\"post_processor\": {\"type\": \"TemplateProcessing\"}"),
      HasSubstr("/post_processor is"));
  EXPECT_THAT(refusal("\"lstrip\": false", "\"lstrip\": true"),
              names("/added_tokens/0/lstrip", "true"));
  EXPECT_THAT(refusal("\"truncation\": null", "\"truncation\": {}"), names("/truncation", "{}"));
}

TEST_F(TokenizerTest, DamageIsNamedWithItsJsonPath) {
  const auto refusal = [&](std::string_view from, std::string_view to) {
    const std::string path = write("t.json", replaced(std::string(kTiny), from, to));
    return refusal_of([&] { Tokenizer::open(path); }, ErrorCode::kCorruption);
  };
  EXPECT_THAT(refusal("\"merges\": [", "\"merges\": [}"),
              AllOf(HasSubstr("t.json is no valid JSON"), HasSubstr("line 9")));
  EXPECT_THAT(refusal("\"b\": 1", "\"b\": -1"), HasSubstr("/model/vocab/b: expected a token's id"));
  EXPECT_THAT(refusal("\"b\": 1", "\"b\": 1.5"), HasSubstr("/model/vocab/b: expected"));
  EXPECT_THAT(refusal("\"b\": 1", "\"b\": 4000000000"), HasSubstr("/model/vocab/b: expected"));
  EXPECT_THAT(refusal("\"b\": 1", "\"b\": 0"), HasSubstr("the id 0 is also that of the token"));
  EXPECT_THAT(refusal("\"b\": 1", "\"b\": 6"), HasSubstr("the id 6 is also that of the token"));
  EXPECT_THAT(refusal("\"b\": 1", "\"\": 1"), HasSubstr("/model/vocab/: a token is empty"));
  EXPECT_THAT(refusal("\"a b\"", "\"a c\""),
              HasSubstr("/model/merges/0: the token \"c\" of the merge is not in the vocabulary"));
  EXPECT_THAT(refusal("\"a b\"", "\"b a\""), HasSubstr("/model/merges/0: the token \"ba\""));
  EXPECT_THAT(refusal("\"a b\"", "\"a b c\""), HasSubstr("/model/merges/0: expected a merge"));
  EXPECT_THAT(refusal("[\"Ġ\", \"ab\"]", "[\"Ġ\"]"),
              HasSubstr("/model/merges/1: expected a merge"));
  EXPECT_THAT(refusal("[\"Ġ\", \"ab\"]", "[\"Ġ\", 3]"),
              HasSubstr("/model/merges/1/1: expected a string"));
  EXPECT_THAT(refusal("\"content\": \"<e>\"", "\"content\": \"\""),
              HasSubstr("/added_tokens/0/content: an added token is empty"));
  EXPECT_THAT(refusal("\"special\": true", "\"special\": 1"),
              HasSubstr("/added_tokens/0/special: expected true or false"));
  const auto refusal_of_file = [&](const std::string& text) {
    const std::string path = write("t.json", text);
    return refusal_of([&] { Tokenizer::open(path); }, ErrorCode::kCorruption);
  };
  EXPECT_THAT(refusal_of_file(""), HasSubstr("no valid JSON"));
  EXPECT_THAT(refusal_of_file("[]"), HasSubstr("expected an object"));
  EXPECT_THAT(refusal_of_file("{}"), HasSubstr("/model: expected an object"));
  EXPECT_THAT(refusal_of_file("null"), HasSubstr("/: expected an object"));
}

// Files in which bytes were changed or cut off give an error or a vocabulary, but no crash.
TEST_F(TokenizerTest, DamagedFilesAreRead) {
  Random random(11);
  int num_refused = 0;
  for (int attempt = 0; attempt < 1500; ++attempt) {
    std::string text(kTiny);
    for (uint64_t i = random.below(4); i > 0; --i) {
      text[random.below(text.size())] = static_cast<char>(random.below(256));
    }
    if (random.below(4) == 0) text.resize(random.below(text.size()));
    const std::string path = write("t.json", text);
    try {
      const Tokenizer tokenizer = Tokenizer::open(path);
      (void)tokenizer.encode("ab ba");
    } catch (const Error&) {
      ++num_refused;
    }
  }
  EXPECT_GT(num_refused, 500);
}

TEST_F(TokenizerTest, ReadsTheFilesOfGpt2) {
  const std::string vocabulary =
      write("vocab.json", R"({"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4, "<|endoftext|>": 5})");
  const std::string valid = "#version: 0.2\na b\nĠ ab\n";
  const auto refusal = [&](const std::string& merges, ErrorCode code = ErrorCode::kCorruption) {
    const std::string path = write("merges.txt", merges);
    return refusal_of([&] { Tokenizer::open_gpt2(vocabulary, path); }, code);
  };
  EXPECT_EQ(refusal(valid), "accepted");
  const Tokenizer tokenizer =
      Tokenizer::open_gpt2(vocabulary, write("merges.txt", "#version: 0.2\r\na b\r\nĠ ab"));
  EXPECT_EQ(tokenizer.encode("ab ab<|endoftext|>"), (Ids{3, 4, 5}));
  EXPECT_EQ(tokenizer.decode(Ids{3, 4, 5}), "ab ab");
  EXPECT_THAT(refusal("#version: 0.2\na b\nĠ a b\n"),
              HasSubstr("merges.txt, line 3: \"Ġ a b\" is no merge"));
  EXPECT_THAT(refusal("a b\n\nĠ ab\n"), HasSubstr("line 2: \"\" is no merge"));
  EXPECT_THAT(refusal("a b\na x\n"), HasSubstr("line 2: the token \"x\" of the merge"));
  EXPECT_THAT(refusal("a b\nb a\n"), HasSubstr("line 2: the token \"ba\" of the merge"));
  EXPECT_THAT(refusal(" b\n"), HasSubstr("line 1: the token \"\" of the merge"));
  EXPECT_THAT(refusal_of([&] { Tokenizer::open_gpt2(vocabulary, folder_.file("missing")); },
                         ErrorCode::kUnavailable),
              HasSubstr("missing"));
  EXPECT_THAT(
      refusal_of([&] { Tokenizer::open_gpt2(write("v.json", "{\"a\": true}"), vocabulary); },
                 ErrorCode::kCorruption),
      HasSubstr("v.json: /a: expected a token's id"));
}

TEST_F(TokenizerTest, SpecialTokensDivideTheTextsOfTheTraining) {
  const Tokenizer tokenizer =
      trained({"ab<s>ab<s>ab<s>", "ab<s><s>"}, {.vocabulary_size = 270, .special_tokens = {"<s>"}});
  EXPECT_EQ(tokenizer.vocabulary_size(), 258);  // "ab" is the only pair
  EXPECT_EQ(tokenizer.encode("ab<s>"), (Ids{257, 0}));
  // The longest of several tokens is taken, whatever their order.
  for (const std::vector<std::string>& tokens :
       {std::vector<std::string>{"<s>", "<s>!"}, {"<s>!", "<s>"}}) {
    const Tokenizer two = trained({}, {.vocabulary_size = 258, .special_tokens = tokens});
    EXPECT_EQ(two.encode("<s>!<s>"), (Ids{*two.id_of("<s>!"), *two.id_of("<s>")}));
  }
}

TEST_F(TokenizerTest, RefusesWhatCannotBe) {
  const auto refused = [](const TokenizerTrainingOptions& options) {
    EXPECT_THROW(trained({"ab"}, options), Error);
  };
  refused({.vocabulary_size = 256});  // one too few for the special token
  refused({.vocabulary_size = int64_t{1} << 40});
  refused({.min_frequency = 0});
  refused({.special_tokens = {""}});
  refused({.special_tokens = {"x"}});
  refused({.special_tokens = {"<s>", "<s>"}});
  refused({.special_tokens = {"\xff\xff"}});
  EXPECT_THROW(Tokenizer::train(nullptr, {}), Error);
  EXPECT_EQ(trained({}, {}).vocabulary_size(), 257);
  EXPECT_EQ(trained({"", "a"}, {}).vocabulary_size(), 257);
  Tokenizer tokenizer = small_tokenizer();
  const Tokenizer moved = std::move(tokenizer);
  EXPECT_EQ(moved.vocabulary_size(), 285);
  EXPECT_THROW(tokenizer.encode("a"), Error);  // NOLINT(bugprone-use-after-move): is refused
}

// A text becomes tokens, files, windows, and the text again.
TEST_F(TokenizerTest, ATextBecomesSamplesOfTokens) {
  const Tokenizer tokenizer = small_tokenizer();
  const Ids ids = tokenizer.encode(kText);
  write_token_file(folder_.file("text.bin"), ids);
  const TokenDataset dataset(folder_.file("text.bin"),
                             {.length = 7, .vocabulary_size = tokenizer.vocabulary_size()});
  std::string text;
  for (int64_t i = 0; i < dataset.size(); ++i) {
    const at::Tensor row = dataset.get(std::vector<int64_t>{i}).data.contiguous();
    text += tokenizer.decode({row.const_data_ptr<int64_t>(), 7});
  }
  EXPECT_TRUE(kText.starts_with(text));
  EXPECT_GT(text.size() + 40, kText.size());
}

}  // namespace
}  // namespace cadre
