// Generates text with a model.
//
// Threads: one. Blocking: one forward for each token. Errors: none.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/train/trainer/config/config.h"
#include "cadre/train/trainer/models/model.h"

namespace cadre::train {

// Continues the prompt for config.tokens tokens, or up to <|endoftext|>, and returns prompt and
// continuation. Equal seeds and parameters give equal text. The result may contain bytes that are
// not valid UTF-8. context: the most tokens that the model takes.
std::string sample_text(const Inference& infer, int64_t context, const SampleConfig& config,
                        uint64_t seed);

}  // namespace cadre::train
