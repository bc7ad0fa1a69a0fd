// Assigns rows of tokens to experts: makes the plan of one forward from the choices of all ranks,
// and runs the exchange of rows that the plan describes.
//
// The choices of all tokens have one order, whatever the number of ranks: all first choices come
// before all second ones, and among these the tokens come in rank order. With a capacity, an expert
// processes the choices of this expert in this order, up to the capacity, and the others are
// dropped. Every rank can compute this from the number of choices by rank, choice and expert, which
// one all_gather exchanges; so the sizes of the exchange of rows are known without another message.
//
// Threads: as ProcessGroup. Blocking: plan_dispatch(), send_to_experts() and return_to_tokens(),
// and the backwards of the last two, until the group's deadline. Lifetime: a plan is a value.
// Errors: as tensor/group/backward/differentiable.h.
// Source: GShard, https://arxiv.org/abs/2006.16668, which also ranks first choices before second
// ones, within a group of tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "cadre/tensor/group/process_group.h"

namespace cadre::parallel {

// The ranks that share the experts of a layer.
struct ExpertGroups {
  ProcessGroup tokens;       // all ranks whose tokens are routed together
  ProcessGroup experts;      // the ranks that divide the experts, in the order of their parts
  std::vector<int> members;  // the ranks in `tokens` of the members of `experts`
};

struct DispatchOptions {
  int64_t num_experts;
  // The capacity of an expert is this factor times the number of choices of all ranks over the
  // number of experts, rounded up. If nullopt, no choice is dropped.
  std::optional<double> capacity_factor;
};

struct DispatchPlan {
  // The processed choices of this rank's tokens, ordered by expert, and for each expert in the
  // order above; (m), int64. tokens: the row of the token. choices: the row in the flattened
  // choices, token * k + choice.
  at::Tensor tokens;
  at::Tensor choices;
  // The numbers of rows, indexed by the rank in ExpertGroups::experts.
  std::vector<int64_t> sent;
  std::vector<int64_t> received;
  // Two permutations of shape (rows received) and dtype int64: of the received rows into the order
  // of experts, and back.
  at::Tensor by_expert;
  at::Tensor by_rank;
  // The numbers of received rows, indexed by the experts of this rank.
  std::vector<int64_t> rows_of_expert;

  // Counts over all ranks, equal on all.
  at::Tensor choices_of_expert;  // has the shape (E) and dtype int64; dropped choices are included
  int64_t num_tokens;
  int64_t num_dropped;  // the number of dropped choices
};

// experts: (n, k), the choices of this rank's tokens. groups: null in one process.
DispatchPlan plan_dispatch(const at::Tensor& experts, const DispatchOptions& options,
                           const ExpertGroups* groups);

// rows: (m, D), in the order of plan.tokens. Returns the rows that this rank's experts process,
// ordered by expert.
at::Tensor send_to_experts(const at::Tensor& rows, const DispatchPlan& plan,
                           const ExpertGroups* groups);
// Does the reverse: returns the results of the experts in the order of plan.tokens.
at::Tensor return_to_tokens(const at::Tensor& rows, const DispatchPlan& plan,
                            const ExpertGroups* groups);

}  // namespace cadre::parallel
