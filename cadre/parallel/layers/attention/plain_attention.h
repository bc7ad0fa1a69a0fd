// Scaled dot-product attention in one process, with dropout by a counter-based generator. The ring
// and all_to_all forms of context parallelism give the same results.
//
// Errors: those of libtorch and of counter_based_dropout.h.
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

// Applies to a part of the attention weights the corresponding part of the dropout mask. weights:
// (B, H, rows, keys), a part of the (num_tokens x num_tokens) weights that begins at the query
// first_row and the key first_key.
struct WeightsRegion {
  int64_t num_tokens;
  int64_t first_row = 0;
  int64_t first_key = 0;
};
at::Tensor drop_weights(const at::Tensor& weights, const AttentionOptions& options,
                        const WeightsRegion& region);

// Throws kInvalidArgument for a dropout without a stream. The message begins with `caller`.
void check_dropout(const std::optional<CounterBasedDropoutOptions>& dropout,
                   std::string_view caller);

double scale_of(const AttentionOptions& options, int64_t head_dim);

}  // namespace cadre
