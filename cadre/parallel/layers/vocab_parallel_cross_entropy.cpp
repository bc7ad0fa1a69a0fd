#include "cadre/parallel/layers/vocab_parallel_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <optional>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/joint_loss.h"
#include "cadre/parallel/layers/recorded_backward.h"
#include "cadre/tensor/group/backward/differentiable.h"
#include "cadre/tensor/mesh/layout.h"

namespace cadre {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Stores which of N tokens the loss ignores, and, for the tokens whose target class is on this
// rank, these targets. The number of these tokens is known to a device only, and the host must not
// wait for it. So on a device all tokens have a class of this rank, and those whose target is on
// another rank are marked.
struct Targets final : torch::CustomClassHolder {
  Targets(ProcessGroup given_group, const at::Tensor& targets, const Chunk& chunk,
          const VocabParallelCrossEntropyOptions& options)
      : group(std::move(given_group)),
        reduction(options.reduction),
        ignored(targets.eq(options.ignore_index)) {
    const at::Tensor is_own = targets.ge(chunk.begin)
                                  .logical_and(targets.lt(chunk.begin + chunk.size))
                                  .logical_and(ignored.logical_not());
    if (targets.is_cpu() || chunk.size == 0) {
      tokens = targets.is_cpu() ? is_own.nonzero().squeeze(1) : at::zeros({0}, targets.options());
      classes = targets.index_select(0, tokens) - chunk.begin;
    } else {
      elsewhere = is_own.logical_not();
      classes = (targets - chunk.begin).clamp(0, chunk.size - 1);
    }
  }

  // Returns from scores (N, V_part) the score of each token's target if this rank has it, else 0.
  at::Tensor of_targets(const at::Tensor& scores) const {
    if (elsewhere.defined()) {
      return scores.gather(1, classes.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0);
    }
    const at::Tensor own = scores.index_select(0, tokens).gather(1, classes.unsqueeze(1));
    return at::zeros({scores.size(0)}, scores.options().requires_grad(false))
        .index_add(0, tokens, own.squeeze(1));
  }

  // Subtracts from `scores` (N, V_part) the weight (N) of each token at its target.
  void subtract_at_targets(const at::Tensor& scores, const at::Tensor& weight) const {
    if (elsewhere.defined()) {
      scores.scatter_add_(1, classes.unsqueeze(1),
                          weight.masked_fill(elsewhere, 0).neg().unsqueeze(1));
    } else {
      scores.index_put_({tokens, classes}, -weight.index_select(0, tokens), /*accumulate=*/true);
    }
  }

  // Reduces the losses (N) of the tokens to one number, shape ().
  at::Tensor reduced(const at::Tensor& losses) const {
    return over_divisor(losses.masked_fill(ignored, 0).sum());
  }
  at::Tensor over_divisor(const at::Tensor& sum) const {
    return reduction == LossReduction::kSum ? sum : sum / ignored.logical_not().sum();
  }

  ProcessGroup group;
  LossReduction reduction;
  at::Tensor ignored;
  at::Tensor elsewhere;  // the tokens whose target this rank has not; undefined on the CPU
  at::Tensor tokens;     // the tokens whose target this rank has; undefined if `elsewhere` is not
  at::Tensor classes;    // the targets of these tokens, counted from this rank's first class
};
using TargetsPointer = c10::intrusive_ptr<Targets>;

at::Tensor largest_of(const at::Tensor& scores, const ProcessGroup& group) {
  at::Tensor largest =
      scores.size(1) > 0
          ? scores.amax(1)
          : at::full({scores.size(0)}, -std::numeric_limits<double>::infinity(), scores.options());
  group.all_reduce(largest, {.op = ReduceOp::kMax});
  return largest;
}

// Computes the loss with differentiable operations, for create_graph.
at::Tensor composed_loss(const at::Tensor& scores, const at::Tensor& largest,
                         const Targets& targets) {
  const at::Tensor shifted = scores - largest.unsqueeze(1);
  const at::Tensor sum = functional::reduce_from_group(shifted.exp().sum(1), targets.group);
  const at::Tensor own = functional::reduce_from_group(targets.of_targets(shifted), targets.group);
  return targets.reduced(sum.log() - own);
}

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  // scores: (N, V_part), this rank's classes.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores,
                            const TargetsPointer& targets) {
    const at::Tensor largest = largest_of(scores, targets->group);
    at::Tensor shifted = scores - largest.unsqueeze(1);
    const at::Tensor own = targets->of_targets(shifted);
    const at::Tensor sums = at::stack({shifted.exp_().sum(1), own});
    targets->group.all_reduce(sums);
    const at::Tensor log_sum = sums.select(0, 0).log();
    context->save_for_backward({scores, largest, log_sum});
    context->saved_data["targets"] = c10::IValue::make_capsule(targets);
    return targets->reduced(log_sum - sums.select(0, 1));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return in_backward_of("vocab_parallel_cross_entropy", [&]() -> variable_list {
      const variable_list saved = context->get_saved_variables();
      const auto targets =
          c10::static_intrusive_pointer_cast<Targets>(context->saved_data["targets"].toCapsule());
      if (at::GradMode::is_enabled()) {
        const at::Tensor largest = saved[1].detach();
        variable_list results =
            recorded_backward({saved[0]}, gradients[0], [&](const variable_list& inputs) {
              return composed_loss(inputs[0], largest, *targets);
            });
        results.emplace_back();
        return results;
      }
      // The gradient of a score is (softmax - 1) for the target's class and softmax for others,
      // times the weight of the token.
      const at::Tensor weight = targets->over_divisor(gradients[0])
                                    .expand({saved[0].size(0)})
                                    .masked_fill(targets->ignored, 0);
      const at::Tensor result =
          (saved[0] - (saved[1] + saved[2]).unsqueeze(1)).exp_().mul_(weight.unsqueeze(1));
      targets->subtract_at_targets(result, weight);
      return {result, {}};
    });
  }
};

void check_arguments(const at::Tensor& logits, const at::Tensor& targets, const ProcessGroup& group,
                     const Chunk& chunk, const VocabParallelCrossEntropyOptions& options) {
  const auto refuse = [&](const std::string& problem) {
    throw Error(ErrorCode::kInvalidArgument,
                format("vocab_parallel_cross_entropy on rank {} of {} of group \"{}\": {}",
                       group.rank(), group.world_size(), group.name(), problem));
  };
  if (logits.dim() == 0 || logits.size(-1) != chunk.size) {
    refuse(
        format("logits of the sizes {} are not this rank's {} of the {} classes; pass those of "
               "a column-parallel head without gather_output",
               list_of(logits.sizes()), chunk.size, options.vocabulary));
  }
  if (targets.scalar_type() != at::kLong ||
      targets.sizes() != logits.sizes().slice(0, logits.dim() - 1)) {
    refuse(format("targets {} {} do not name one class, as int64, for each token of logits {}",
                  c10::toString(targets.scalar_type()), list_of(targets.sizes()),
                  list_of(logits.sizes())));
  }
  const at::Tensor outside = targets.lt(0)
                                 .logical_or(targets.ge(options.vocabulary))
                                 .logical_and(targets.ne(options.ignore_index));
  if (!outside.is_cpu()) {
    at::_assert_async(outside.any().logical_not(),
                      format("vocab_parallel_cross_entropy: a target is none of the {} classes and "
                             "not ignore_index = {}",
                             options.vocabulary, options.ignore_index));
    return;
  }
  if (!outside.any().item<bool>()) return;
  refuse(format("the target {} is none of the {} classes and not ignore_index = {}",
                targets.masked_select(outside)[0].item<int64_t>(), options.vocabulary,
                options.ignore_index));
}

at::Tensor mean_over_token_group(const at::Tensor& logits, const at::Tensor& targets,
                                 const ProcessGroup& group,
                                 const VocabParallelCrossEntropyOptions& options) {
  VocabParallelCrossEntropyOptions own = options;
  own.token_group.reset();
  own.reduction = LossReduction::kSum;
  at::Tensor sum;
  int64_t count = 0;
  at::Tensor device_count;
  std::optional<Error> refusal;
  try {
    if (options.reduction != LossReduction::kMean) {
      throw Error(ErrorCode::kInvalidArgument,
                  "vocab_parallel_cross_entropy: the reduction is kSum, but the options have a "
                  "token group, over which the loss is a mean; leave one of them out");
    }
    sum = vocab_parallel_cross_entropy(logits, targets, group, own);
    const at::Tensor num_tokens = targets.ne(options.ignore_index).sum();
    if (num_tokens.is_cpu()) {
      count = num_tokens.item<int64_t>();
    } else {
      device_count = num_tokens;
    }
  } catch (const Error& error) {
    // The ranks with other tokens wait for this rank in the collective below, so the error is
    // passed to it.
    if (error.code() != ErrorCode::kInvalidArgument || group.error()) throw;
    refusal = error;
  }
  return mean_over_tokens(sum, count, *options.token_group, "vocab_parallel_cross_entropy", refusal,
                          device_count);
}

}  // namespace

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                        const ProcessGroup& group,
                                        const VocabParallelCrossEntropyOptions& options) {
  if (options.token_group) return mean_over_token_group(logits, targets, group, options);
  const Chunk chunk = chunk_of(options.vocabulary, group.world_size(), group.rank());
  check_arguments(logits, targets, group, chunk, options);
  const bool is_narrow = logits.scalar_type() == at::kBFloat16 || logits.scalar_type() == at::kHalf;
  const at::Tensor scores = logits.reshape({targets.numel(), chunk.size});
  return CrossEntropy::apply(
      is_narrow ? scores.to(at::kFloat) : scores,
      c10::make_intrusive<Targets>(group, targets.reshape({-1}), chunk, options));
}

}  // namespace cadre
