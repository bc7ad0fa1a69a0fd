#include "cadre/parallel/layers/attention/plain_attention.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>

#include <cmath>
#include <limits>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {
namespace {

// Applies counter-based dropout. libtorch's attention would draw from the generator of the process
// instead.
at::Tensor attention_with_dropout(const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, const AttentionOptions& options) {
  const int64_t group_size = query.size(1) / key.size(1);
  const auto repeated = [&](const at::Tensor& heads) {
    return heads.repeat_interleave(group_size, 1);
  };
  at::Tensor scores =
      query.matmul(repeated(key).transpose(-2, -1)) * scale_of(options, query.size(-1));
  const int64_t num_tokens = scores.size(-1);
  if (options.is_causal) {
    const at::Tensor future =
        at::ones({num_tokens, num_tokens}, scores.options().dtype(at::kBool)).triu(1);
    scores = scores.masked_fill(future, -std::numeric_limits<double>::infinity());
  }
  const at::Tensor weights =
      drop_weights(at::softmax(scores, -1), options, {.num_tokens = num_tokens});
  return weights.matmul(repeated(value));
}

}  // namespace

at::Tensor plain_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const AttentionOptions& options) {
  check_dropout(options.dropout, "attention");
  if (options.dropout) return attention_with_dropout(query, key, value, options);
  return at::scaled_dot_product_attention(query, key, value, {}, 0.0, options.is_causal,
                                          options.scale,
                                          /*enable_gqa=*/query.size(1) != key.size(1));
}

at::Tensor drop_weights(const at::Tensor& weights, const AttentionOptions& options,
                        const WeightsRegion& region) {
  if (!options.dropout) return weights;
  const int64_t num_heads = options.num_heads == 0 ? weights.size(1) : options.num_heads;
  return counter_based_dropout(
      weights, options.dropout->p, *options.dropout->stream, options.dropout->layer,
      {.sizes = {num_heads, region.num_tokens, region.num_tokens},
       .offsets = {options.first_head, region.first_row, region.first_key}});
}

void check_dropout(const std::optional<CounterBasedDropoutOptions>& dropout,
                   std::string_view caller) {
  if (!dropout || dropout->stream != nullptr) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      format("{}: options.dropout->stream is null; all layers of a model share one", caller));
}

double scale_of(const AttentionOptions& options, int64_t head_dim) {
  return options.scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
}

}  // namespace cadre
