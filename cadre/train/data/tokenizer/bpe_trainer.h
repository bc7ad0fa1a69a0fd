// Training of a byte-pair encoding.
//
// Threads: one. Blocking: never. Errors: kInvalidArgument. Source: Sennrich et al., 2016; the order
// of merges is that of the BpeTrainer of Hugging Face's tokenizers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include "cadre/train/data/tokenizer/bpe_model.h"
#include "cadre/train/data/tokenizer/tokenizer.h"

namespace cadre::data {

class BpeTrainer {
 public:
  explicit BpeTrainer(const TokenizerTrainingOptions& options);

  // Counts the words of a text, which is divided by the special tokens.
  void add(std::string_view text);
  BpeModel train() const;

 private:
  TokenizerTrainingOptions options_;
  std::unordered_map<std::string, int64_t> counts_;  // how often each word occurs
};

}  // namespace cadre::data
