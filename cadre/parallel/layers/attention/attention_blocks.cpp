#include "cadre/parallel/layers/attention/attention_blocks.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>

#include "cadre/parallel/layers/attention/plain_attention.h"

namespace cadre {
namespace {

constexpr int64_t kTileRows = 256;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor rows_of(const at::Tensor& grouped, const ScoreTile& tile) {
  return grouped.narrow(3, tile.first_row, tile.num_rows);
}

at::Tensor keys_of(const at::Tensor& block, const ScoreTile& tile, at::ScalarType dtype) {
  return block.narrow(2, tile.first_key, tile.num_keys).to(dtype);
}

// Reverses folded(): returns a product for the rows of a tile as (B, H_kv, G, rows, width).
at::Tensor unfolded(const at::Tensor& product, const ScoreTile& tile) {
  return product.unflatten(2, {-1, tile.num_rows});
}

}  // namespace

TileScores::TileScores(const QueryRows& rows)
    : rows_(rows), scale_(scale_of(rows.options, rows.query.size(-1))) {
  query_ = grouped(rows.query) * scale_;
}

std::vector<ScoreTile> TileScores::tiles_of(const KeyValueBlock& block) const {
  std::vector<ScoreTile> tiles;
  int64_t first_row = 0;
  for (const TokenRun& row_run : rows_.runs) {
    for (int64_t begin = 0; begin < row_run.size; begin += kTileRows) {
      const TokenRun rows{row_run.begin + begin, std::min(kTileRows, row_run.size - begin)};
      int64_t first_key = 0;
      for (const TokenRun& key_run : block.runs) {
        TokenRun keys = key_run;
        // A causal mask hides all keys after the last row of the tile from every row of the tile.
        if (rows_.options.is_causal) {
          keys.size = std::clamp<int64_t>(rows.begin + rows.size - keys.begin, 0, keys.size);
        }
        if (keys.size > 0) {
          tiles.push_back({.first_row = first_row + begin,
                           .first_key = first_key,
                           .num_rows = rows.size,
                           .num_keys = keys.size,
                           .rows = rows,
                           .keys = keys});
        }
        first_key += key_run.size;
      }
    }
    first_row += row_run.size;
  }
  return tiles;
}

at::Tensor TileScores::grouped(const at::Tensor& heads) const {
  return heads.to(at::toOpMathType(heads.scalar_type()))
      .unflatten(1, {rows_.num_key_value_heads, heads.size(1) / rows_.num_key_value_heads});
}

at::Tensor TileScores::folded(const at::Tensor& grouped, const ScoreTile& tile) {
  return rows_of(grouped, tile).flatten(2, 3);
}

at::Tensor TileScores::scores(const at::Tensor& keys, const ScoreTile& tile) const {
  at::Tensor scores = unfolded(scaled_query(tile).matmul(keys.transpose(-2, -1)), tile);
  const bool sees_future = tile.keys.begin + tile.keys.size - 1 > tile.rows.begin;
  if (!rows_.options.is_causal || !sees_future) return scores;
  const auto positions = [&](const TokenRun& run) {
    return at::arange(run.begin, run.begin + run.size, scores.options().dtype(at::kLong));
  };
  const at::Tensor future = positions(tile.keys).unsqueeze(0).gt(positions(tile.rows).unsqueeze(1));
  return scores.masked_fill_(future, -kInfinity);
}

at::Tensor TileScores::dropped(const at::Tensor& weights, const ScoreTile& tile) const {
  if (!rows_.options.dropout) return weights;
  return drop_weights(weights.flatten(1, 2), rows_.options,
                      {.num_tokens = rows_.num_tokens,
                       .first_row = tile.rows.begin,
                       .first_key = tile.keys.begin})
      .view(weights.sizes());
}

AttentionForward::AttentionForward(const QueryRows& rows, int64_t value_dim) : scores_(rows) {
  std::vector<int64_t> sizes = scores_.grouped(rows.query).sizes().vec();
  const at::TensorOptions options = rows.query.options().dtype(scores_.sum_dtype());
  sizes.back() = value_dim;
  weighted_ = at::zeros(sizes, options);
  sizes.back() = 1;
  sum_ = at::zeros(sizes, options);
  largest_ = at::full_like(sum_, -kInfinity);
}

void AttentionForward::add(const KeyValueBlock& block) {
  for (const ScoreTile& tile : scores_.tiles_of(block)) {
    add(tile, keys_of(block.key, tile, scores_.sum_dtype()),
        keys_of(block.value, tile, scores_.sum_dtype()));
  }
}

void AttentionForward::add(const ScoreTile& tile, const at::Tensor& key, const at::Tensor& value) {
  at::Tensor weights = scores_.scores(key, tile);
  at::Tensor largest = rows_of(largest_, tile);
  const at::Tensor largest_now = at::maximum(largest, weights.amax(-1, /*keepdim=*/true));
  // If a row has seen no key yet, its largest score is -inf; the base 0 gives exp(-inf - 0) = 0,
  // while exp(-inf - -inf) would be NaN.
  const at::Tensor base = largest_now.masked_fill(largest_now.eq(-kInfinity), 0);
  weights.sub_(base).exp_();
  const at::Tensor rescaling = (largest - base).exp_();
  rows_of(sum_, tile).mul_(rescaling).add_(weights.sum(-1, /*keepdim=*/true));
  const at::Tensor folded = scores_.dropped(weights, tile).flatten(2, 3);
  rows_of(weighted_, tile).mul_(rescaling).add_(unfolded(folded.matmul(value), tile));
  largest.copy_(largest_now);
}

at::Tensor AttentionForward::output() const {
  return (weighted_ / sum_).flatten(1, 2);
}

at::Tensor AttentionForward::log_sum_exp() const {
  return largest_ + sum_.log();
}

AttentionBackward::AttentionBackward(const QueryRows& rows, const Result& result)
    : scores_(rows),
      log_sum_exp_(result.log_sum_exp),
      gradient_(scores_.grouped(result.gradient)),
      row_products_((gradient_ * scores_.grouped(result.output)).sum(-1, /*keepdim=*/true)),
      query_gradient_(at::zeros_like(scores_.grouped(rows.query))) {}

// Let p be the attention weights, q = mask * p the weights after dropout, g the gradient of the
// output, and ' the transpose. Then dv = q' g, dp = mask * (g v'), ds = p * (dp - sum(g * output)),
// dquery = ds key, dkey = ds' query.
AttentionBackward::KeyValueGradient AttentionBackward::add(const KeyValueBlock& block) {
  const at::ScalarType dtype = scores_.sum_dtype();
  KeyValueGradient gradient{
      .key = at::zeros(block.key.sizes(), block.key.options().dtype(dtype)),
      .value = at::zeros(block.value.sizes(), block.value.options().dtype(dtype))};
  for (const ScoreTile& tile : scores_.tiles_of(block)) {
    const at::Tensor key = keys_of(block.key, tile, dtype);
    const at::Tensor value = keys_of(block.value, tile, dtype);
    const at::Tensor of_output = TileScores::folded(gradient_, tile);
    const at::Tensor weights = scores_.scores(key, tile).sub_(rows_of(log_sum_exp_, tile)).exp_();
    keys_of(gradient.value, tile, dtype)
        .add_(scores_.dropped(weights, tile).flatten(2, 3).transpose(-2, -1).matmul(of_output));
    const at::Tensor of_weights =
        scores_.dropped(unfolded(of_output.matmul(value.transpose(-2, -1)), tile), tile);
    const at::Tensor of_scores =
        ((of_weights - rows_of(row_products_, tile)) * weights).flatten(2, 3);
    rows_of(query_gradient_, tile).add_(unfolded(of_scores.matmul(key), tile));
    keys_of(gradient.key, tile, dtype)
        .add_(of_scores.transpose(-2, -1).matmul(scores_.scaled_query(tile)));
  }
  return gradient;
}

at::Tensor AttentionBackward::query_gradient() const {
  return (query_gradient_ * scores_.scale()).flatten(1, 2);
}

}  // namespace cadre
