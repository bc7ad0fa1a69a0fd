#include "cadre/train/data/tokenizer/bpe_files.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/train/data/tokenizer/words.h"

namespace cadre::data {
namespace {

using Json = nlohmann::json;

constexpr TokenId kMaxTokenId = (1 << 24) - 1;  // ids are indices of a list

// A value in a JSON file, with its path for errors.
class JsonAt {
 public:
  JsonAt(const std::string& file, std::string path, const Json& value)
      : file_(file), path_(std::move(path)), value_(value) {}

  const Json& value() const { return value_; }

  [[noreturn]] void refuse(std::string_view what) const {
    throw Error(ErrorCode::kCorruption,
                cadre::format("Tokenizer: {}: {}: {}", file_,
                              printable(path_.empty() ? "/" : path_), what));
  }
  [[noreturn]] void refuse_kind(std::string_view expected) const {
    refuse(cadre::format("expected {}, and there is a value of the type {}", expected,
                         value_.type_name()));
  }
  [[noreturn]] void refuse_unsupported(std::string_view supported) const {
    std::string text = value_.dump(-1, ' ', false, Json::error_handler_t::replace);
    if (text.size() > 100) text = text.substr(0, 100) + "...";
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("Tokenizer: {}: {} is {}, which is not supported; expected {}", file_,
                              path_, printable(text), supported));
  }

  // Returns the member of an object; null if it is missing.
  JsonAt member(const std::string& name) const {
    static const Json kNull;
    if (!value_.is_object()) refuse_kind("an object");
    const auto found = value_.find(name);
    return {file_, path_ + "/" + name, found == value_.end() ? kNull : *found};
  }
  JsonAt element(size_t index) const {
    return {file_, cadre::format("{}/{}", path_, index), value_[index]};
  }
  std::string text() const {
    if (!value_.is_string()) refuse_kind("a string");
    return value_.get<std::string>();
  }
  bool flag(bool absent) const {
    if (value_.is_null()) return absent;
    if (!value_.is_boolean()) refuse_kind("true or false");
    return value_.get<bool>();
  }
  TokenId id() const {
    const bool is_id = value_.is_number_unsigned() && value_.get<uint64_t>() <= kMaxTokenId;
    if (!is_id)
      refuse(cadre::format("expected a token's id, an integer from 0 to {}", kMaxTokenId));
    return static_cast<TokenId>(value_.get<uint64_t>());
  }
  // Refuses a part that has another value than null.
  void expect_null() const {
    if (!value_.is_null()) refuse_unsupported("null");
  }
  // Refuses a flag that is true.
  void expect_false() const {
    if (flag(false)) refuse_unsupported("false");
  }
  // Refuses a text that is not empty.
  void expect_no_text() const {
    if (!value_.is_null() && !text().empty()) refuse_unsupported("null or an empty text");
  }

 private:
  const std::string& file_;
  std::string path_;
  const Json& value_;
};

Json parse_json(const NamedText& file) {
  try {
    return Json::parse(file.text);
  } catch (const Json::parse_error& error) {
    // The library's text names the line and the column.
    throw Error(ErrorCode::kCorruption, cadre::format("Tokenizer: {} is no valid JSON: {}",
                                                      file.name, printable(error.what())));
  }
}

void set_token(BpeModel& model, TokenId id, const std::string& bytes, const JsonAt& at) {
  const auto index = static_cast<size_t>(id);
  if (index >= model.tokens.size()) model.tokens.resize(index + 1);
  if (!model.tokens[index].empty() && model.tokens[index] != bytes) {
    at.refuse(cadre::format("the id {} is also that of the token \"{}\"", id,
                            printable(name_of_bytes(model.tokens[index]))));
  }
  model.tokens[index] = bytes;
}

void read_vocabulary(BpeModel& model, const JsonAt& vocabulary) {
  if (!vocabulary.value().is_object()) vocabulary.refuse_kind("an object of tokens and ids");
  for (const auto& [name, id] : vocabulary.value().items()) {
    const JsonAt at = vocabulary.member(name);
    if (name.empty()) at.refuse("a token is empty");
    const TokenId token_id = at.id();
    const auto index = static_cast<size_t>(token_id);
    if (index < model.tokens.size() && model.tokens[index] == name) continue;  // an added token
    const std::optional<std::string> bytes = bytes_of_name(name);
    // A name with a character that no byte has, such as a space, stands for itself. No word
    // contains it.
    set_token(model, token_id, bytes.value_or(name), at);
    if (bytes) model.ids.emplace(*bytes, token_id);
  }
}

// Adds a merge of two tokens. Returns what is wrong with it, if anything.
std::optional<std::string> add_merge(BpeModel& model, const std::string& left,
                                     const std::string& right) {
  const auto id_of = [&](const std::string& name) -> std::optional<TokenId> {
    const std::optional<std::string> bytes = bytes_of_name(name);
    const auto found = bytes ? model.ids.find(*bytes) : model.ids.end();
    if (found == model.ids.end()) return std::nullopt;
    return found->second;
  };
  for (const std::string& name : {left, right, left + right}) {
    if (!name.empty() && id_of(name)) continue;
    return cadre::format("the token \"{}\" of the merge is not in the vocabulary", printable(name));
  }
  model.merges.emplace_back(*id_of(left), *id_of(right));
  return std::nullopt;
}

// Returns the two tokens that one space divides; nullopt if there is another number of spaces.
std::optional<std::pair<std::string, std::string>> halves_of(std::string_view line) {
  const size_t space = line.find(' ');
  if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos) {
    return std::nullopt;
  }
  return std::pair{std::string(line.substr(0, space)), std::string(line.substr(space + 1))};
}

void read_merges(BpeModel& model, const JsonAt& merges) {
  if (!merges.value().is_array()) merges.refuse_kind("a list of merges");
  for (size_t i = 0; i < merges.value().size(); ++i) {
    const JsonAt merge = merges.element(i);
    std::optional<std::pair<std::string, std::string>> halves;
    if (merge.value().is_string()) {
      halves = halves_of(merge.text());
    } else if (merge.value().is_array() && merge.value().size() == 2) {
      halves = std::pair{merge.element(0).text(), merge.element(1).text()};
    }
    if (!halves) merge.refuse("expected a merge: a text with one space, or a list of two texts");
    if (const auto wrong = add_merge(model, halves->first, halves->second)) merge.refuse(*wrong);
  }
}

void read_added_tokens(BpeModel& model, const JsonAt& added) {
  if (added.value().is_null()) return;
  if (!added.value().is_array()) added.refuse_kind("a list of added tokens");
  for (size_t i = 0; i < added.value().size(); ++i) {
    const JsonAt token = added.element(i);
    for (const char* const option : {"single_word", "lstrip", "rstrip"}) {
      token.member(option).expect_false();
    }
    AddedToken read{.text = token.member("content").text(),
                    .id = token.member("id").id(),
                    .is_special = token.member("special").flag(false),
                    .is_normalized = token.member("normalized").flag(true)};
    if (read.text.empty()) token.member("content").refuse("an added token is empty");
    set_token(model, read.id, read.text, token);
    model.added.push_back(std::move(read));
  }
}

void check_pre_tokenizer(BpeModel& model, const JsonAt& part) {
  constexpr std::string_view kSupported = "the pre-tokenizer ByteLevel with use_regex";
  if (!part.value().is_object() || part.member("type").value() != "ByteLevel" ||
      !part.member("use_regex").flag(true)) {
    part.refuse_unsupported(kSupported);
  }
  model.adds_prefix_space = part.member("add_prefix_space").flag(true);
}

// Checks the parts beside the model: those that change no token are ignored, others refused.
void check_parts(BpeModel& model, const JsonAt& root) {
  root.member("normalizer").expect_null();
  root.member("truncation").expect_null();
  root.member("padding").expect_null();
  check_pre_tokenizer(model, root.member("pre_tokenizer"));
  const auto is_byte_level = [](const JsonAt& part) {
    return part.value().is_object() && part.member("type").value() == "ByteLevel";
  };
  if (const JsonAt part = root.member("decoder"); !is_byte_level(part)) {
    part.refuse_unsupported("the decoder ByteLevel");
  }
  if (const JsonAt part = root.member("post_processor");
      !part.value().is_null() && !is_byte_level(part)) {
    part.refuse_unsupported("null or the post-processor ByteLevel");
  }
}

}  // namespace

BpeModel parse_tokenizer_json(const NamedText& file) {
  const Json json = parse_json(file);
  const JsonAt root(file.name, "", json);
  const JsonAt part = root.member("model");
  if (!part.value().is_object()) part.refuse_kind("an object, the model");
  const JsonAt type = part.member("type");
  // Files of older versions leave the type of a BPE out.
  if (!type.value().is_null() && type.text() != "BPE") type.refuse_unsupported("the model BPE");
  for (const char* const name : {"dropout", "unk_token"}) part.member(name).expect_null();
  for (const char* const name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    part.member(name).expect_no_text();
  }
  for (const char* const name : {"byte_fallback", "ignore_merges"}) {
    part.member(name).expect_false();
  }
  BpeModel model;
  check_parts(model, root);
  read_added_tokens(model, root.member("added_tokens"));
  read_vocabulary(model, part.member("vocab"));
  read_merges(model, part.member("merges"));
  return model;
}

BpeModel parse_gpt2(const NamedText& vocabulary, const NamedText& merges) {
  BpeModel model;
  const Json json = parse_json(vocabulary);
  read_vocabulary(model, JsonAt(vocabulary.name, "", json));
  std::string_view rest = merges.text;
  for (int64_t number = 1; !rest.empty(); ++number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (number == 1 && line.starts_with("#version")) continue;
    const auto halves = halves_of(line);
    const std::optional<std::string> wrong =
        halves ? add_merge(model, halves->first, halves->second)
               : cadre::format("\"{}\" is no merge; expected two tokens with one space between",
                               printable(line.substr(0, 100)));
    if (wrong) {
      throw Error(ErrorCode::kCorruption,
                  cadre::format("Tokenizer: {}, line {}: {}", merges.name, number, *wrong));
    }
  }
  const std::string end_of_text = "<|endoftext|>";
  if (const auto found = model.ids.find(end_of_text); found != model.ids.end()) {
    model.added.push_back({.text = end_of_text, .id = found->second});
  }
  return model;
}

std::string tokenizer_json(const BpeModel& model) {
  Json vocabulary = Json::object();
  std::unordered_set<TokenId> ids_of_added;
  Json added = Json::array();
  for (const AddedToken& token : model.added) {
    ids_of_added.insert(token.id);
    added.push_back({{"id", token.id},
                     {"content", token.text},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", token.is_normalized},
                     {"special", token.is_special}});
  }
  for (size_t id = 0; id < model.tokens.size(); ++id) {
    const std::string& bytes = model.tokens[id];
    if (bytes.empty()) continue;
    const bool is_added = ids_of_added.contains(static_cast<TokenId>(id));
    vocabulary[is_added ? bytes : name_of_bytes(bytes)] = id;
  }
  Json merges = Json::array();
  for (const auto& [left, right] : model.merges) {
    merges.push_back({name_of_bytes(model.tokens[static_cast<size_t>(left)]),
                      name_of_bytes(model.tokens[static_cast<size_t>(right)])});
  }
  const Json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", model.adds_prefix_space},
                           {"trim_offsets", true},
                           {"use_regex", true}};
  const Json json = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", added},
                     {"normalizer", nullptr},
                     {"pre_tokenizer", byte_level},
                     {"post_processor", byte_level},
                     {"decoder", byte_level},
                     {"model",
                      {{"type", "BPE"},
                       {"dropout", nullptr},
                       {"unk_token", nullptr},
                       {"continuing_subword_prefix", nullptr},
                       {"end_of_word_suffix", nullptr},
                       {"fuse_unk", false},
                       {"byte_fallback", false},
                       {"ignore_merges", false},
                       {"vocab", vocabulary},
                       {"merges", merges}}}};
  return json.dump();
}

}  // namespace cadre::data
