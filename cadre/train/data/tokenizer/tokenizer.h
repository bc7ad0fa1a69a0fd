// Byte-level byte-pair encoding, as GPT-2 has it: trained here, or read from the files of GPT-2 or
// of Hugging Face's tokenizers.
//
//   cadre::Tokenizer tokenizer = cadre::Tokenizer::open("gpt2/tokenizer.json");
//   cadre::write_token_file("train.bin", tokenizer.encode(text));
//
// Encoding is that of Hugging Face's tokenizers for these files: text between added tokens is
// divided into words, and within a word the pair with the lowest rank is merged until there is
// none. Every sequence of bytes can be encoded, also one that is not UTF-8, and decode() returns
// it.
//
// Threads: all methods are const and may be called from any thread. Blocking: reading and writing
// files; train() reads all texts. Lifetime: a cheap value; copies share the vocabulary. Errors:
// kUnavailable for files that cannot be read; kCorruption for damaged files, with the file and its
// line or JSON path; kInvalidArgument for files with parts that are not supported, which are named,
// for ids that are not in the vocabulary, and for a tokenizer that was moved from. Source: Sennrich
// et al., "Neural machine translation of rare words with subword units", 2016. Guide:
// docs/guide/training/data.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"

namespace cadre {

struct TokenizerTrainingOptions {
  // The number of tokens to reach: the special tokens, the 256 bytes, and merged tokens. Fewer are
  // made if no pair occurs often enough.
  int64_t vocabulary_size = 32000;
  // Texts that are one token each, and not words: their ids are 0, 1, ... They are not empty, and
  // valid UTF-8.
  std::vector<std::string> special_tokens = {"<|endoftext|>"};
  int64_t min_frequency = 2;  // a pair that occurs less often is not merged
};

struct TokenDecodingOptions {
  bool skip_special_tokens = true;  // if true, special tokens give no text
};

class CADRE_EXPORT Tokenizer {
 public:
  // Makes a vocabulary by merging the most frequent pair of tokens again and again; of pairs that
  // occur equally often the one with the lower ids. next_text: returns one text after another, and
  // nullopt after the last. Special tokens divide the texts.
  static Tokenizer train(const std::function<std::optional<std::string>()>& next_text,
                         const TokenizerTrainingOptions& options);

  // Opens a tokenizer.json of Hugging Face's tokenizers. Supported is the model BPE at the level of
  // bytes: pre-tokenizer ByteLevel with use_regex, decoder ByteLevel, post-processor ByteLevel or
  // none, no normalizer, and added tokens without single_word, lstrip and rstrip.
  static Tokenizer open(const std::string& path);

  // Opens GPT-2's vocab.json and merges.txt. <|endoftext|>, if the vocabulary has it, is special.
  static Tokenizer open_gpt2(const std::string& vocabulary_path, const std::string& merges_path);

  // Returns the ids of the text's tokens. Throws kInvalidArgument for a byte that has no token,
  // which only a vocabulary that was not made for all bytes lacks.
  std::vector<int64_t> encode(std::string_view text) const;

  // Returns the bytes of the tokens. They are the encoded text, unless the file's pre-tokenizer has
  // add_prefix_space.
  std::string decode(std::span<const int64_t> ids, const TokenDecodingOptions& options = {}) const;

  // Returns the largest id plus 1: the size of the model's embedding.
  int64_t vocabulary_size() const;
  // Returns the id of a token by its bytes, such as " the" or "<|endoftext|>".
  std::optional<int64_t> id_of(std::string_view token) const;

  // Writes a tokenizer.json, which Hugging Face's tokenizers read. Replaces the file atomically.
  void save(const std::string& path) const;

 private:
  struct Contents;
  explicit Tokenizer(std::shared_ptr<const Contents> contents);
  const Contents& contents() const;  // throws if the program has moved from this tokenizer

  std::shared_ptr<const Contents> contents_;  // shared by copies
};

}  // namespace cadre
