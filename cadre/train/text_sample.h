// Text that a model writes.
//
// Threads: one. Blocking: one forward for each token. Errors: none.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/train/config/config.h"
#include "cadre/train/models/model.h"

namespace cadre::train {

// Of a model of text that sees `context` tokens. Goes on from the prompt for config.tokens tokens,
// or to <|endoftext|>. The same seed and parameters give the same text. Bytes that are no valid
// UTF-8 come back as they are.
std::string sample_text(const Inference& infer, int64_t context, const SampleConfig& config,
                        uint64_t seed);

}  // namespace cadre::train
