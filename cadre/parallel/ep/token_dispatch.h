// Assigns tokens to experts: computes the plan of one forward from the choices of all ranks, and
// runs the all_to_all of rows that the plan describes.
//
// A choice is one expert that the router has selected for a token; each token has k of them. The
// choices of all tokens have one order, whatever the number of ranks: all first choices come before
// all second ones, and among these the tokens are in rank order. If experts have a capacity, an
// expert processes its choices in this order up to the capacity, and the others are dropped. Every
// rank can compute this from the number of choices by rank, choice number and expert, which one
// all_gather exchanges. So every rank knows the sizes of the all_to_all of rows without another
// message.
//
// If the tokens are on a device, the plan is computed on the host: plan_dispatch() waits for one
// copy of the choices to the host, and moves all index tensors to the device by one copy.
//
// Threads: as ProcessGroup. Blocking: plan_dispatch(), send_to_experts() and return_to_tokens(),
// and the backwards of the last two, until the group's deadline. Lifetime: a plan is a value.
// Errors: those of tensor/group/backward/differentiable.h.
// Source: GShard, https://arxiv.org/abs/2006.16668, which also gives first choices priority over
// second ones, within a group of tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "cadre/tensor/group/process_group.h"

namespace cadre::parallel {

// The process groups of the ranks that share the experts of a layer.
struct ExpertGroups {
  ProcessGroup tokens;       // all ranks whose tokens are routed together
  ProcessGroup experts;      // the ranks that divide the experts, in the order of the experts
  std::vector<int> members;  // for each rank of `experts`, its rank in `tokens`
};

struct DispatchOptions {
  int64_t num_experts;
  // The capacity of an expert is this factor times the mean number of choices for each expert, over
  // all ranks, rounded up. If nullopt, no choice is dropped.
  std::optional<double> capacity_factor;
};

struct DispatchPlan {
  // The processed choices of this rank's tokens, m of them, ordered by expert, and for each expert
  // in the order that the head of this file describes. Both tensors are (m), int64. tokens: the row
  // of the token. choices: the row in the flattened choices, token * k + choice number.
  at::Tensor tokens;
  at::Tensor choices;
  // The numbers of rows sent to and received from each rank, indexed by the rank in
  // ExpertGroups::experts.
  std::vector<int64_t> sent;
  std::vector<int64_t> received;
  // Two permutations of shape (number of received rows) and dtype int64: by_expert sorts the
  // received rows by expert, and by_rank restores rank order.
  at::Tensor by_expert;
  at::Tensor by_rank;
  // The numbers of received rows for each expert of this rank.
  std::vector<int64_t> rows_of_expert;

  // Counts over the tokens of all ranks. They are equal on all ranks.
  at::Tensor choices_of_expert;      // (E), int64, on the CPU; dropped choices are included
  at::Tensor choices_beside_tokens;  // the same on the device of the tokens
  int64_t num_tokens;
  int64_t num_dropped;  // the number of dropped choices
};

// `experts` has the shape (n, k): the choices of this rank's tokens. `groups` is null in one
// process.
DispatchPlan plan_dispatch(const at::Tensor& experts, const DispatchOptions& options,
                           const ExpertGroups* groups);

// Sends the tokens' rows (m, D), in the order of plan.tokens, to the ranks of their experts.
// Returns the rows that this rank's experts process, ordered by expert.
at::Tensor send_to_experts(const at::Tensor& rows, const DispatchPlan& plan,
                           const ExpertGroups* groups);
// Sends the results of the experts back, and returns those of this rank's tokens in the order of
// plan.tokens.
at::Tensor return_to_tokens(const at::Tensor& rows, const DispatchPlan& plan,
                            const ExpertGroups* groups);

}  // namespace cadre::parallel
