// The cross-entropy of logits whose classes are divided among the ranks of a group, without any
// rank having the logits of all classes.
//
// Threads: as ProcessGroup. Blocking: two all_reduces of one and two numbers a token in forward,
// none in backward; with a token group two more of two numbers and of one. Lifetime: the graph
// keeps the groups and the logits.
// Errors: kInvalidArgument, on all ranks alike, also those of the token group, for a target that is
// no class; on the rank that has other logits than its part of the vocabulary; for kSum with a
// token group. Cost: backward computes the exponentials again, so nothing of the size of the logits
// is kept but the logits. A backward with create_graph is right. Source: Megatron-LM,
// https://arxiv.org/abs/1909.08053, section 3.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

// The reduction of the losses of those tokens that are not ignored.
enum class LossReduction : uint8_t {
  kMean,  // the result is NaN if no token counts
  kSum,
};

struct VocabParallelCrossEntropyOptions {
  // The number of classes on all ranks together; each rank has a chunk of them by the rule of
  // Shard.
  int64_t vocabulary;
  // The loss ignores tokens with this target.
  int64_t ignore_index = -100;
  LossReduction reduction = LossReduction::kMean;
  // Ranks with different tokens, such as those of a context-parallel or expert-parallel model.
  // kMean is then the mean over the tokens of all of them, the same on all, and its backward
  // computes the terms of this rank's tokens; sum the gradients over the group. If nullopt, the
  // mean is over this rank's tokens.
  std::optional<ProcessGroup> token_group = {};
};

// logits: (..., V_part), floating-point, this rank's classes; targets: (...), int64, the same on
// every rank. Result: (), the same on every rank, in float32 for logits of bfloat16 and float16,
// else in their dtype.
CADRE_EXPORT at::Tensor vocab_parallel_cross_entropy(
    const at::Tensor& logits, const at::Tensor& targets, const ProcessGroup& group,
    const VocabParallelCrossEntropyOptions& options);

}  // namespace cadre
