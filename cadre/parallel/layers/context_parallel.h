// Divides a sequence among the ranks of a group (context parallelism): says which tokens each rank
// has, and gives a model what it needs besides attention.
//
//   cadre::ContextParallel context(mesh["cp"], {.num_tokens = 8192});
//   const at::Tensor mine = context.shard(tokens, 1);        // (B, T) to (B, tokens of this rank)
//   ... = embedding(mine) + positions(context.positions(tokens.device()));
//   ... = context_parallel_attention(query, key, value, context, {.is_causal = true});
//   context.mean_over_tokens(sum_of_losses, num_losses).backward();
//   context.sum_gradients(model.parameters());
//
// The same ContextParallel divides the sequence and is passed to attention, so both always use the
// same order of tokens.
//
// Threads: as ProcessGroup. Blocking: the constructor, unshard(), mean_over_tokens(),
// sum_gradients(), set_context_parallel() and the backward of unshard() are collective, until the
// group's deadline. Lifetime: a value that is cheap to copy; keeps the group.
// Errors: cadre::Error, kInvalidArgument. All ranks throw the same error for options that differ
// between ranks, and for parameters that differ or have a sparse gradient. Only the rank itself
// throws for a tensor with a wrong number of tokens.
// Source: chunks in zigzag order, https://arxiv.org/abs/2311.09431 and Llama 3,
// https://arxiv.org/abs/2407.21783. docs/decisions/0018-context-parallel.md.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
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
  kRing,  // keys and values are passed around a ring of the ranks; works for any number of heads
  kAllToAll,  // ranks exchange tokens for heads: each computes some heads for all tokens
};
CADRE_EXPORT std::string_view to_string(ContextForm form);

enum class SequenceOrder : uint8_t {
  kContiguous,  // rank r of n has chunk r of n
  kZigzag,  // rank r has the chunks r and 2n - 1 - r of 2n, which is equal work in causal attention
};
CADRE_EXPORT std::string_view to_string(SequenceOrder order);

struct ContextParallelOptions {
  // The number of tokens of the whole sequence. It is cut into chunks by the rule of Shard
  // (tensor/mesh/placement.h): if it is not divisible by the number of chunks, the last chunks are
  // shorter or empty.
  int64_t num_tokens;
  ContextForm form = ContextForm::kRing;
  SequenceOrder order = SequenceOrder::kZigzag;
};

// A run of consecutive tokens of a sequence.
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

  // Returns the tokens of a rank as runs in ascending order, which is the order in which the rank
  // holds them. No run is empty.
  std::vector<TokenRun> runs(int rank) const;
  // Return the number of tokens of `rank`, and of this rank.
  int64_t num_tokens_of(int rank) const;
  int64_t num_own_tokens() const { return num_tokens_of(group_.rank()); }
  // Returns the positions of this rank's tokens in the sequence: (num_own_tokens) int64.
  at::Tensor positions(c10::Device device = c10::Device(c10::DeviceType::CPU)) const;

  // Returns this rank's tokens of a tensor that has the whole sequence along `dim`, which may be
  // negative. Differentiable. No communication.
  at::Tensor shard(const at::Tensor& whole, int64_t dim) const;
  // The inverse of shard(): gathers the tokens of all ranks. Collective. Differentiable; the
  // backward computes the gradient of the sum of all ranks' losses.
  at::Tensor unshard(const at::Tensor& shard, int64_t dim) const;
  // These convert a tensor along `dim` between the order of the sequence and rank order, in which
  // the tokens of rank 0 come first, then those of rank 1, and so on. No communication.
  at::Tensor in_rank_order(const at::Tensor& whole, int64_t dim) const;
  at::Tensor in_sequence_order(const at::Tensor& ranks, int64_t dim) const;

  // `sum`, of shape (), is the sum of the losses of this rank's tokens, and `count` the number of
  // these tokens. Returns the mean over the tokens of all ranks: shape (), the same on every rank,
  // NaN if there are no tokens. Its backward reaches this rank's tokens only, so sum the gradients
  // of the parameters over the group afterwards (sum_gradients()).
  at::Tensor mean_over_tokens(const at::Tensor& sum, int64_t count) const;
  // Sums over the group the gradients of parameters that are equal on all ranks. Pass the same
  // parameters in the same order on all ranks; a parameter that is listed twice (a tied weight)
  // counts once. If this rank has no gradient of a parameter but another rank has one, this rank
  // counts as zeros; if no rank has one, none is created, as in one process. Call it once for each
  // step, after the last backward: a second call adds the sums again.
  void sum_gradients(const std::vector<at::Tensor>& parameters) const;

  // Returns the message space that ring attention uses, which is separate from that of the
  // program's own messages on the group. REQUIRES: the form is kRing, and the group has several
  // ranks.
  const PrivateMessages& messages() const { return *messages_; }

 private:
  ProcessGroup group_;
  ContextParallelOptions options_;
  std::shared_ptr<const PrivateMessages> messages_;
};

// A layer whose input may be only this rank's tokens of a sequence, (B, T of this rank, ...), or
// that takes them itself.
class CADRE_EXPORT ContextParallelLayer {
 public:
  virtual ~ContextParallelLayer() = default;
  // Returns the options of the layer that must be equal on all ranks.
  virtual std::string options_text() const { return {}; }
  // Returns true if the input is the whole sequence, of which the layer takes this rank's tokens.
  virtual bool takes_whole_sequences() const { return false; }
  void set_context_parallel(const ContextParallel& context) { context_ = context; }

 protected:
  // Returns null if the layer gets whole sequences.
  const ContextParallel* context() const { return context_ ? &*context_ : nullptr; }

 private:
  std::optional<ContextParallel> context_;
};

// Sets the ContextParallel of every ContextParallelLayer in the module: each SelfAttention,
// CounterBasedDropout and TransformerEmbedding. A second call replaces it, for example for a longer
// sequence. Collective. Throws kInvalidArgument on all ranks, and changes nothing, in three cases:
// if there is no such layer; if the options of layers differ between ranks; or if the module has a
// layer of libtorch that combines the tokens of a sequence, because the layer would see this rank's
// tokens only. Such layers are MultiheadAttention and the Transformer layers, RNN, LSTM, GRU,
// one-dimensional convolutions with a kernel wider than one token, BatchNorm1d and InstanceNorm1d.
// If a module applies such a layer to whole sequences, call this function for its other parts. It
// does not detect functions that a forward() calls, such as scaled_dot_product_attention().
CADRE_EXPORT void set_context_parallel(torch::nn::Module& module, const ContextParallel& context);

}  // namespace cadre
