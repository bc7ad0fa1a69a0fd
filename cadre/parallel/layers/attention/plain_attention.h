// Scaled dot-product attention in one process, with dropout by a counter-based generator. The forms
// of context parallelism give the same results.
//
// Threads, blocking, lifetime: none of its own. Errors: those of libtorch and of
// counter_based_dropout.h.
// Source: at::scaled_dot_product_attention; grouped queries, https://arxiv.org/abs/2305.13245.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "cadre/parallel/layers/attention/attention_options.h"

namespace cadre {

// query: (B, H, T, D), key: (B, H_kv, T, D), value: (B, H_kv, T, D_v), where H is a multiple of
// H_kv and query head h uses key head h / (H / H_kv). Result: (B, H, T, D_v).
at::Tensor plain_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const AttentionOptions& options);

// drop_weights() applies this part of the mask of the attention weights. weights: (B, H, rows,
// keys), from `first_row` and `first_key` on, of an attention of num_tokens queries and keys.
struct WeightsRegion {
  int64_t num_tokens;
  int64_t first_row = 0;
  int64_t first_key = 0;
};
at::Tensor drop_weights(const at::Tensor& weights, const AttentionOptions& options,
                        const WeightsRegion& region);

// Throws kInvalidArgument for a dropout without a stream. caller: begins the message.
void check_dropout(const std::optional<CounterBasedDropoutOptions>& dropout,
                   std::string_view caller);

double scale_of(const AttentionOptions& options, int64_t head_dim);

}  // namespace cadre
