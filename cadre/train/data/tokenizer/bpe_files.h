// The files of byte-level vocabularies: GPT-2's vocab.json and merges.txt, and the tokenizer.json
// of Hugging Face's tokenizers.
//
// Threads: pure functions. Blocking: never. Errors: kCorruption with the file and the JSON path or
// line for damaged content; kInvalidArgument for parts that are not supported, by name.
#pragma once

#include <string>
#include <string_view>

#include "cadre/train/data/tokenizer/bpe_model.h"

namespace cadre::data {

// A file's content, with its name for errors.
struct NamedText {
  std::string name;
  std::string_view text;
};

BpeModel parse_tokenizer_json(const NamedText& file);
BpeModel parse_gpt2(const NamedText& vocabulary, const NamedText& merges);

// Returns a tokenizer.json.
std::string tokenizer_json(const BpeModel& model);

}  // namespace cadre::data
