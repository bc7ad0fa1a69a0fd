// Computes the cross-entropy of logits whose classes are divided among the ranks of a group. No
// rank gathers the logits of all classes.
//
// Threads: as ProcessGroup. Blocking: two all_reduces in forward, of one and of two numbers for
// each token, and none in backward. With a token group there are two more all_reduces, of two
// numbers and of one, and on a device a third one of one number. Lifetime: the graph keeps the
// groups and the logits. Errors: kInvalidArgument. All ranks, including those of the token group,
// throw for a target that is not a class; on a device it is the failure of a kernel instead, which
// the next wait for the device throws. Only the rank itself throws if its logits do not have the
// size of its part of the vocabulary, or for kSum with a token group. Cost: backward computes the
// exponentials again, so the logits are the only large tensor that is saved. A backward with
// create_graph gives correct results. Source: Megatron-LM, https://arxiv.org/abs/1909.08053,
// section 3.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

// How the losses of the tokens that are not ignored are reduced.
enum class LossReduction : uint8_t {
  kMean,  // the mean; NaN if all tokens are ignored
  kSum,
};

struct VocabParallelCrossEntropyOptions {
  // The number of classes on all ranks together. Each rank has a chunk of them by the rule of Shard
  // (tensor/mesh/placement.h).
  int64_t vocabulary;
  // The loss ignores tokens with this target.
  int64_t ignore_index = -100;
  LossReduction reduction = LossReduction::kMean;
  // The group of ranks with different tokens, such as those of a context-parallel or
  // expert-parallel model. kMean is then the mean over the tokens of all of these ranks and is
  // equal on all of them. Its backward computes the gradients from this rank's tokens only, so sum
  // the gradients over the group. If nullopt, the mean is over this rank's tokens.
  std::optional<ProcessGroup> token_group = {};
};

// logits: (..., V_part), floating-point, this rank's classes. targets: (...), int64, the same on
// every rank. Result: shape (), the same on every rank, in float32 for logits of bfloat16 and
// float16, else in the dtype of the logits.
CADRE_EXPORT at::Tensor vocab_parallel_cross_entropy(
    const at::Tensor& logits, const at::Tensor& targets, const ProcessGroup& group,
    const VocabParallelCrossEntropyOptions& options);

}  // namespace cadre
