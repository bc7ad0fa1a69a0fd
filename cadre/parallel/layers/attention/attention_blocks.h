// Computes attention of some query rows to keys and values that are added block by block (online
// softmax), and its backward.
//
// The forward keeps for each row, over the blocks added so far: m, the largest score; l, the sum of
// exp(score - m); a, the sum of exp(score - m) * value. If a block has a larger score, l and a are
// multiplied by exp(old m - new m) before the block is added. The output is a / l, and m + log l is
// saved. The backward computes the weights of a block again as exp(score - (m + log l)), so no
// weights are stored. Apart from the block, it needs only the sum of gradient times output for each
// row.
//
// Sums are kept in float32 for bfloat16 and float16, else in the dtype of the query. Scores are
// computed for kTileRows query rows at a time. Scores that the causal mask excludes are not
// computed, except in tiles on the diagonal. A row whose scores in a block are all minus infinity
// adds zero.
//
// Threads: one thread at a time. Autograd does not record these computations. The positions of
// tokens in the sequence are given as runs of consecutive tokens.
// Source: online softmax, https://arxiv.org/abs/1805.02867; FlashAttention,
// https://arxiv.org/abs/2205.14135; blockwise over ranks, https://arxiv.org/abs/2310.01889.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cadre/parallel/layers/attention/attention_options.h"
#include "cadre/parallel/layers/context_parallel.h"

namespace cadre {

struct KeyValueBlock {
  at::Tensor key;              // has the shape (B, H_kv, tokens, D)
  at::Tensor value;            // has the shape (B, H_kv, tokens, D_v)
  std::vector<TokenRun> runs;  // the positions of the tokens
};

// The query rows and options that forward and backward share.
struct QueryRows {
  at::Tensor query;            // has the shape (B, H, tokens, D)
  std::vector<TokenRun> runs;  // the positions of the tokens
  int64_t num_key_value_heads;
  int64_t num_tokens;  // the number of tokens in the whole sequence
  AttentionOptions options;
};

// The range of query rows and of keys whose scores are computed together.
struct ScoreTile {
  // first_row is an index among the query rows, and first_key an index among the keys of the block.
  int64_t first_row;
  int64_t first_key;
  int64_t num_rows;
  int64_t num_keys;
  TokenRun rows;  // the positions of these rows and keys in the sequence
  TokenRun keys;
};

// Computes the scores of tiles. Keeps the query rows, already multiplied by the scale.
class TileScores {
 public:
  explicit TileScores(const QueryRows& rows);

  std::vector<ScoreTile> tiles_of(const KeyValueBlock& block) const;
  // Reshapes (B, H, tokens, width) to (B, H_kv, G, tokens, width), where G = H / H_kv, and casts to
  // the dtype of the sums.
  at::Tensor grouped(const at::Tensor& heads) const;
  // Returns the rows of a tile of a grouped tensor, reshaped to (B, H_kv, G * rows, width).
  static at::Tensor folded(const at::Tensor& grouped, const ScoreTile& tile);
  // Returns the scores (B, H_kv, G, rows, keys), which are minus infinity where the mask excludes a
  // key.
  at::Tensor scores(const at::Tensor& keys, const ScoreTile& tile) const;
  at::Tensor scaled_query(const ScoreTile& tile) const { return folded(query_, tile); }
  at::Tensor dropped(const at::Tensor& weights, const ScoreTile& tile) const;
  double scale() const { return scale_; }
  at::ScalarType sum_dtype() const { return query_.scalar_type(); }

 private:
  QueryRows rows_;
  double scale_;
  at::Tensor query_;  // the grouped query, times the scale
};

class AttentionForward {
 public:
  AttentionForward(const QueryRows& rows, int64_t value_dim);

  void add(const KeyValueBlock& block);
  // These return the output (B, H, tokens, D_v) and the log-sum-exp (B, H_kv, G, tokens, 1), in the
  // dtype of the sums. Call them when all blocks have been added.
  at::Tensor output() const;
  at::Tensor log_sum_exp() const;

 private:
  void add(const ScoreTile& tile, const at::Tensor& key, const at::Tensor& value);

  TileScores scores_;
  at::Tensor largest_, sum_, weighted_;
};

class AttentionBackward {
 public:
  // output, gradient: (B, H, tokens, D_v). log_sum_exp: the result of
  // AttentionForward::log_sum_exp().
  struct Result {
    at::Tensor output, log_sum_exp, gradient;
  };
  AttentionBackward(const QueryRows& rows, const Result& result);

  struct KeyValueGradient {
    at::Tensor key, value;  // both have the shapes of the block's tensors and the dtype of the sums
  };
  // Returns the gradients of the block's key and value that come from these query rows.
  KeyValueGradient add(const KeyValueBlock& block);
  // Returns the gradient of the query, (B, H, tokens, D), in the dtype of the sums. Call it when
  // all blocks have been added.
  at::Tensor query_gradient() const;

 private:
  TileScores scores_;
  at::Tensor log_sum_exp_, gradient_, row_products_, query_gradient_;
};

}  // namespace cadre
