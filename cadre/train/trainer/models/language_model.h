// Models that predict the next token at every position of a text.
//
// Threads, blocking, errors: as Model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "cadre/train/trainer/config/config.h"
#include "cadre/train/trainer/models/model.h"

namespace cadre::train {

// forward() maps tokens (B, T) int64, T at most context(), to logits (B, T, vocabulary).
class LanguageModel : public Model {
 public:
  virtual int64_t context() const = 0;
};

// Makes the model of the configuration. Its initial values depend only on `seed`, not on libtorch's
// default generator, which the ranks of one process share.
std::shared_ptr<LanguageModel> make_language_model(const ModelConfig& config, int64_t vocabulary,
                                                   uint64_t seed);

// Returns the mean cross entropy over all tokens of logits (B, T, V) against targets (B, T), in
// nats. For an empty batch returns 0, with a gradient of zeros.
at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace cadre::train
