// Options of an attention.
//
// Threads: a plain value. Blocking: never. Lifetime: shares the stream of the dropout.
// Errors: none.
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
  // The first query head of this call, and the number of query heads of the model. Dropout uses
  // both if the ranks divide the model's heads. 0 means that this call has all heads.
  int64_t first_head = 0;
  int64_t num_heads = 0;
};

}  // namespace cadre
