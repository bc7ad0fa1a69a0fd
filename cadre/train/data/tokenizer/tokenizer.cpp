#include "cadre/train/data/tokenizer/tokenizer.h"

#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/train/data/tokenizer/added_tokens.h"
#include "cadre/train/data/tokenizer/bpe_files.h"
#include "cadre/train/data/tokenizer/bpe_model.h"
#include "cadre/train/data/tokenizer/bpe_trainer.h"
#include "cadre/train/data/tokenizer/words.h"

namespace cadre {
namespace {

constexpr size_t kMaxTokenizerBytes = size_t{1} << 30;

std::vector<data::AddedToken> added_of(const data::BpeModel& model, bool is_normalized) {
  std::vector<data::AddedToken> added;
  for (const data::AddedToken& token : model.added) {
    if (token.is_normalized == is_normalized) added.push_back(token);
  }
  return added;
}

}  // namespace

struct Tokenizer::Contents {
  explicit Contents(data::BpeModel from)
      : model(std::move(from)),
        encoder(model),
        plain(added_of(model, false)),
        normalized(added_of(model, true)),
        is_special(model.tokens.size()) {
    for (const data::AddedToken& token : model.added) {
      is_special[static_cast<size_t>(token.id)] = token.is_special;
    }
  }

  // Appends the tokens of a text without added tokens.
  void encode_text(std::string_view text, std::vector<int64_t>& ids) const {
    const auto take = [&](std::string_view word) { encoder.encode(word, ids); };
    if (model.adds_prefix_space && !text.starts_with(' ')) {
      data::for_each_word(" " + std::string(text), take);
    } else {
      data::for_each_word(text, take);
    }
  }

  data::BpeModel model;
  data::BpeEncoder encoder;
  data::AddedTokens plain;       // are looked for first
  data::AddedTokens normalized;  // are looked for in what is between the others
  std::vector<bool> is_special;  // by id
};

Tokenizer::Tokenizer(std::shared_ptr<const Contents> contents) : contents_(std::move(contents)) {}

const Tokenizer::Contents& Tokenizer::contents() const {
  if (contents_ == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "Tokenizer: this tokenizer was moved from; use the one that it was moved into");
  }
  return *contents_;
}

Tokenizer Tokenizer::train(const std::function<std::optional<std::string>()>& next_text,
                           const TokenizerTrainingOptions& options) {
  if (next_text == nullptr) {
    throw Error(ErrorCode::kInvalidArgument, "Tokenizer::train: next_text is null");
  }
  data::BpeTrainer trainer(options);
  while (const std::optional<std::string> text = next_text()) trainer.add(*text);
  return Tokenizer(std::make_shared<const Contents>(trainer.train()));
}

Tokenizer Tokenizer::open(const std::string& path) {
  const std::string text = os::read_file(path, kMaxTokenizerBytes).value_or_throw();
  return Tokenizer(
      std::make_shared<const Contents>(data::parse_tokenizer_json({.name = path, .text = text})));
}

Tokenizer Tokenizer::open_gpt2(const std::string& vocabulary_path, const std::string& merges_path) {
  const std::string vocabulary =
      os::read_file(vocabulary_path, kMaxTokenizerBytes).value_or_throw();
  const std::string merges = os::read_file(merges_path, kMaxTokenizerBytes).value_or_throw();
  return Tokenizer(std::make_shared<const Contents>(data::parse_gpt2(
      {.name = vocabulary_path, .text = vocabulary}, {.name = merges_path, .text = merges})));
}

std::vector<int64_t> Tokenizer::encode(std::string_view text) const {
  const Contents& all = contents();
  std::vector<int64_t> ids;
  const auto take_token = [&](const data::AddedToken& token) { ids.push_back(token.id); };
  all.plain.divide(
      text,
      [&](std::string_view part) {
        all.normalized.divide(
            part, [&](std::string_view inner) { all.encode_text(inner, ids); }, take_token);
      },
      take_token);
  return ids;
}

std::string Tokenizer::decode(std::span<const int64_t> ids,
                              const TokenDecodingOptions& options) const {
  const Contents& all = contents();
  std::string text;
  for (const int64_t id : ids) {
    const auto index = static_cast<size_t>(id);
    if (id < 0 || id >= vocabulary_size() || all.model.tokens[index].empty()) {
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("Tokenizer: there is no token with the id {}; ids are from 0 to {}",
                                id, vocabulary_size() - 1));
    }
    if (options.skip_special_tokens && all.is_special[index]) continue;
    text += all.model.tokens[index];
  }
  return text;
}

int64_t Tokenizer::vocabulary_size() const {
  return std::ssize(contents().model.tokens);
}

std::optional<int64_t> Tokenizer::id_of(std::string_view token) const {
  for (const data::AddedToken& added : contents().model.added) {
    if (added.text == token) return added.id;
  }
  const auto found = contents().model.ids.find(std::string(token));
  if (found == contents().model.ids.end()) return std::nullopt;
  return found->second;
}

void Tokenizer::save(const std::string& path) const {
  const std::string text = data::tokenizer_json(contents().model);
  os::replace_file(path, wire::as_bytes(text)).value_or_throw();
}

}  // namespace cadre
