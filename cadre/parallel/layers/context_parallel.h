// A sequence that is divided among the ranks of a group: which tokens each rank has, and what a
// model needs for it besides attention.
//
//   cadre::ContextParallel context(mesh["cp"], {.num_tokens = 8192});
//   const at::Tensor mine = context.shard(tokens, 1);        // (B, T) to (B, tokens of this rank)
//   ... = embedding(mine) + positions(context.positions());
//   ... = context_parallel_attention(query, key, value, context, {.is_causal = true});
//   context.mean_over_tokens(sum_of_losses, num_losses).backward();
//   context.sum_gradients(model.parameters());
//
// One value divides the sequence and is passed to attention, so both always use the same order of
// the tokens.
//
// Threads: as ProcessGroup. The constructor is a collective of the group. Blocking: the
// constructor, unshard(), mean_over_tokens(), sum_gradients() and set_context_parallel(), until the
// group's deadline; the backward of unshard(). Lifetime: a cheap value; keeps the group.
// Errors: cadre::Error, kInvalidArgument. On all ranks alike: for options that differ between
// ranks, for parameters that differ or have a sparse gradient. On one rank: for a tensor that has
// another number of tokens.
// Source: chunks in zigzag order, https://arxiv.org/abs/2311.09431 and Llama 3,
// https://arxiv.org/abs/2407.21783. docs/decisions/0018-context-parallel.md.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/mesh/ranks.h"

namespace cadre {

class PrivateMessages;

enum class ContextForm : uint8_t {
  kRing,  // keys and values are passed around a ring of the ranks; any number of heads is possible
  kAllToAll,  // ranks exchange tokens for heads: each computes some heads for all tokens
};
CADRE_EXPORT std::string_view to_string(ContextForm form);

enum class SequenceOrder : uint8_t {
  kContiguous,  // rank r of n has chunk r of n
  kZigzag,  // rank r has the chunks r and 2n - 1 - r of 2n, which is equal work in causal attention
};
CADRE_EXPORT std::string_view to_string(SequenceOrder order);

struct ContextParallelOptions {
  // The number of tokens of the whole sequence. Chunks are those of Shard
  // (tensor/mesh/placement.h): if the number is not divisible by the ranks, the last chunks are
  // shorter or empty.
  int64_t num_tokens;
  ContextForm form = ContextForm::kRing;
  SequenceOrder order = SequenceOrder::kZigzag;
};

// Consecutive tokens of a sequence.
struct TokenRun {
  int64_t begin;
  int64_t size;
  friend bool operator==(const TokenRun&, const TokenRun&) = default;
};

class CADRE_EXPORT ContextParallel {
 public:
  // ranks: a ProcessGroup, or a mesh of one axis.
  ContextParallel(const Ranks& ranks, const ContextParallelOptions& options);

  const ProcessGroup& group() const { return group_; }
  const ContextParallelOptions& options() const { return options_; }

  // Returns the tokens of a rank as ascending runs, in the order in which the rank holds them; no
  // run is empty.
  std::vector<TokenRun> runs(int rank) const;
  // Return the number of tokens of `rank`, and of this rank.
  int64_t num_tokens_of(int rank) const;
  int64_t num_own_tokens() const { return num_tokens_of(group_.rank()); }
  // Returns the positions of this rank's tokens in the sequence: (num_own_tokens) int64 on the CPU.
  at::Tensor positions() const;

  // Returns this rank's tokens of a tensor that has the whole sequence along `dim`, which may be
  // negative. Differentiable; no communication.
  at::Tensor shard(const at::Tensor& whole, int64_t dim) const;
  // Does the reverse of shard(). Collective. Differentiable: the gradient is that of the sum of the
  // ranks' losses.
  at::Tensor unshard(const at::Tensor& shard, int64_t dim) const;
  // Convert between the order of the sequence, along `dim`, and that of the ranks' tokens, rank by
  // rank. No communication.
  at::Tensor in_rank_order(const at::Tensor& whole, int64_t dim) const;
  at::Tensor in_sequence_order(const at::Tensor& ranks, int64_t dim) const;

  // sum: (), the sum of the losses of this rank's tokens; count: the number of these tokens.
  // Returns the mean over the tokens of all ranks: (), the same on every rank, NaN if no token
  // counts. Its backward goes to this rank's tokens only: sum the gradients of the parameters over
  // the group.
  at::Tensor mean_over_tokens(const at::Tensor& sum, int64_t count) const;
  // Sums the gradients of parameters that are equal on all ranks over the group; called after
  // backward. The list has the same parameters in the same order on all ranks; a parameter that is
  // in it twice (a tied weight) counts once. A parameter without a gradient on this rank counts as
  // zeros, and stays without one if no rank has one, as in one process. Call it once for each step,
  // after the last backward: a second call adds the sums again.
  void sum_gradients(const std::vector<at::Tensor>& parameters) const;

  // Returns the messages for the forms of attention. The program's own messages on the group never
  // match them. REQUIRES: the form is kRing, and the group has several ranks.
  const PrivateMessages& messages() const { return *messages_; }

 private:
  ProcessGroup group_;
  ContextParallelOptions options_;
  std::shared_ptr<const PrivateMessages> messages_;
};

// A layer whose input may be this rank's tokens (B, T of this rank, ...) of a sequence.
class CADRE_EXPORT ContextParallelLayer {
 public:
  virtual ~ContextParallelLayer() = default;
  // Returns the options of the layer that must be equal on all ranks.
  virtual std::string options_text() const { return {}; }
  void set_context_parallel(const ContextParallel& context) { context_ = context; }

 protected:
  // Returns null while the layer has whole sequences.
  const ContextParallel* context() const { return context_ ? &*context_ : nullptr; }

 private:
  std::optional<ContextParallel> context_;
};

// Sets the sequence of every ContextParallelLayer in the module: of each SelfAttention,
// CounterBasedDropout and TransformerEmbedding. A second call sets another sequence, such as a
// longer one. Collective. Throws kInvalidArgument on all ranks, and changes nothing, if there is no
// such layer, if the options of layers differ between ranks, or if the module has a layer of
// libtorch that combines the tokens of a sequence, because it would see this rank's tokens only:
// MultiheadAttention and the Transformer layers, RNN, LSTM, GRU, one-dimensional convolutions wider
// than a token, BatchNorm1d and InstanceNorm1d. If a module applies such a layer to whole
// sequences, call this for its other parts. Functions that a forward() calls, such as
// scaled_dot_product_attention(), are not noticed.
CADRE_EXPORT void set_context_parallel(torch::nn::Module& module, const ContextParallel& context);

}  // namespace cadre
