// The options of scaled dot-product attention. Copies share the dropout stream.
#pragma once

#include <cstdint>
#include <optional>

#include "cadre/parallel/layers/counter_based_dropout.h"

namespace cadre {

struct AttentionOptions {
  bool is_causal = false;
  // The scale of QK^T. The default is 1 / sqrt(D).
  std::optional<double> scale = {};
  // Dropout on the attention weights (B, heads, T, T).
  std::optional<CounterBasedDropoutOptions> dropout = {};
  // The index, in the model, of the first query head of this call, and the number of query heads of
  // the model. Dropout needs both if the ranks divide the model's heads. num_heads = 0 means that
  // this call has all heads.
  int64_t first_head = 0;
  int64_t num_heads = 0;
};

}  // namespace cadre
