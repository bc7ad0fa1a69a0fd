// Configurations of small language models, and tokens for them, for the tests of the trainer's
// models.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>

#include "cadre/train/trainer/config/config.h"

namespace cadre::testing {

inline constexpr int64_t kVocabulary = 11;

inline train::ModelConfig small_language_model(const std::string& kind) {
  train::ModelConfig config;
  config.kind = kind == "experts" ? "gpt" : kind;
  config.experts = kind == "experts" ? 4 : 0;
  config.layers = 2;
  config.heads = 2;
  config.width = 8;
  config.context = 6;
  config.window = 3;
  return config;
}

inline at::Tensor some_tokens() {
  return torch::tensor({{1, 5, 3, 0, 10, 2}, {4, 4, 9, 7, 8, 6}});
}

}  // namespace cadre::testing
