#include "cadre/parallel/ep/token_dispatch.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "cadre/tensor/device/pinned_tensor.h"
#include "cadre/tensor/group/backward/differentiable.h"

namespace cadre::parallel {
namespace {

// The number of tokens that select each expert, int64 (ranks, k, E): counts[r][c][e] is the number
// of tokens of rank r whose choice number c is expert e.
class ChoiceCounts {
 public:
  ChoiceCounts(const at::Tensor& experts, int64_t num_experts, const ExpertGroups* groups)
      : num_selected_(experts.size(1)), num_experts_(num_experts) {
    const at::NoGradGuard no_grad;
    counts_ = at::zeros({1, num_selected_, num_experts}, at::kLong);
    int64_t* const own = counts_.mutable_data_ptr<int64_t>();
    const int64_t* const chosen = experts.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < experts.numel(); ++i) {
      ++own[(i % num_selected_) * num_experts + chosen[i]];
    }
    if (groups == nullptr) return;
    const at::Tensor all =
        at::empty({groups->tokens.world_size(), num_selected_, num_experts}, at::kLong);
    groups->tokens.all_gather(all, counts_);
    counts_ = all;
  }

  int64_t num_ranks() const { return counts_.size(0); }
  int64_t num_selected() const { return num_selected_; }
  int64_t num_experts() const { return num_experts_; }
  int64_t of(int64_t rank, int64_t choice, int64_t expert) const {
    return counts_
        .const_data_ptr<int64_t>()[(rank * num_selected_ + choice) * num_experts_ + expert];
  }
  int64_t total() const { return counts_.sum().item<int64_t>(); }
  at::Tensor of_experts() const { return counts_.sum(at::IntArrayRef{0, 1}); }

 private:
  int64_t num_selected_;
  int64_t num_experts_;
  at::Tensor counts_;
};

// The numbers of choices that are processed and not dropped. They are the first ones of each rank,
// choice number and expert.
struct Processed {
  std::vector<int64_t> of_ranks;  // has the shape (ranks, E)
  std::vector<int64_t> of_own;    // has the shape (k, E)
  int64_t total = 0;
};

Processed processed_within(int64_t capacity, const ChoiceCounts& counts, int64_t own_rank) {
  const int64_t num_experts = counts.num_experts();
  Processed result;
  result.of_ranks.resize(static_cast<size_t>(counts.num_ranks() * num_experts));
  result.of_own.resize(static_cast<size_t>(counts.num_selected() * num_experts));
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    int64_t free = capacity;
    for (int64_t choice = 0; choice < counts.num_selected(); ++choice) {
      for (int64_t rank = 0; rank < counts.num_ranks(); ++rank) {
        const int64_t count = std::min(free, counts.of(rank, choice, expert));
        free -= count;
        result.total += count;
        result.of_ranks[rank * num_experts + expert] += count;
        if (rank == own_rank) result.of_own[choice * num_experts + expert] = count;
      }
    }
  }
  return result;
}

// Fills plan.tokens and plan.choices by a counting sort. `processed` has this rank's numbers, (k,
// E).
void order_own_choices(DispatchPlan& plan, const at::Tensor& experts,
                       std::vector<int64_t> processed, int64_t num_experts) {
  const int64_t num_tokens = experts.size(0);
  const int64_t num_selected = experts.size(1);
  std::vector<int64_t> next(static_cast<size_t>(num_experts));  // the next index of each expert
  int64_t num_processed = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    next[expert] = num_processed;
    for (int64_t choice = 0; choice < num_selected; ++choice) {
      num_processed += processed[choice * num_experts + expert];
    }
  }
  plan.tokens = at::empty({num_processed}, at::kLong);
  plan.choices = at::empty({num_processed}, at::kLong);
  int64_t* const tokens = plan.tokens.mutable_data_ptr<int64_t>();
  int64_t* const choices = plan.choices.mutable_data_ptr<int64_t>();
  const int64_t* const chosen = experts.const_data_ptr<int64_t>();
  for (int64_t choice = 0; choice < num_selected; ++choice) {
    for (int64_t token = 0; token < num_tokens; ++token) {
      const int64_t row = token * num_selected + choice;
      int64_t& left = processed[choice * num_experts + chosen[row]];
      if (left == 0) continue;
      --left;
      const int64_t place = next[chosen[row]]++;
      tokens[place] = token;
      choices[place] = row;
    }
  }
}

// Fills the fields that describe the all_to_all of rows. Received rows are in rank order, and those
// of one rank are ordered by expert.
void plan_exchange(DispatchPlan& plan, const Processed& processed, const ChoiceCounts& counts,
                   const ExpertGroups& groups) {
  const int64_t num_experts = counts.num_experts();
  const auto num_members = static_cast<int64_t>(groups.members.size());
  const int64_t experts_of_rank = num_experts / num_members;
  const int64_t first_own = groups.experts.rank() * experts_of_rank;
  const auto rows_of = [&](int64_t rank, int64_t expert) {
    return processed.of_ranks[rank * num_experts + expert];
  };
  plan.rows_of_expert.assign(static_cast<size_t>(experts_of_rank), 0);
  for (int64_t member = 0; member < num_members; ++member) {
    int64_t sent = 0;
    int64_t received = 0;
    for (int64_t i = 0; i < experts_of_rank; ++i) {
      sent += rows_of(groups.tokens.rank(), member * experts_of_rank + i);
      const int64_t rows = rows_of(groups.members[member], first_own + i);
      received += rows;
      plan.rows_of_expert[i] += rows;
    }
    plan.sent.push_back(sent);
    plan.received.push_back(received);
  }
  const int64_t total = std::reduce(plan.received.begin(), plan.received.end());
  plan.by_expert = at::empty({total}, at::kLong);
  plan.by_rank = at::empty({total}, at::kLong);
  int64_t* const by_expert = plan.by_expert.mutable_data_ptr<int64_t>();
  int64_t* const by_rank = plan.by_rank.mutable_data_ptr<int64_t>();
  // The next free index for each expert of this rank.
  std::vector<int64_t> next(static_cast<size_t>(experts_of_rank));
  std::exclusive_scan(plan.rows_of_expert.begin(), plan.rows_of_expert.end(), next.begin(),
                      int64_t{0});
  int64_t received_row = 0;
  for (const int rank : groups.members) {
    for (int64_t i = 0; i < experts_of_rank; ++i) {
      for (int64_t count = rows_of(rank, first_own + i); count > 0; --count) {
        by_rank[received_row] = next[i];
        by_expert[next[i]++] = received_row++;
      }
    }
  }
}

bool exchanges(const ExpertGroups* groups) {
  return groups != nullptr && groups->experts.world_size() > 1;
}

// Moves the tensors that the plan's users index with to the device, by one copy that does not block
// the host.
void move_to_device(DispatchPlan& plan, c10::Device device) {
  plan.choices_beside_tokens = plan.choices_of_expert;
  if (device.is_cpu()) return;
  const std::array<at::Tensor*, 5> moved = {&plan.tokens, &plan.choices, &plan.by_expert,
                                            &plan.by_rank, &plan.choices_beside_tokens};
  int64_t total = 0;
  for (const at::Tensor* tensor : moved) total += tensor->defined() ? tensor->numel() : 0;
  const at::Tensor host = device::empty_pinned(device.type(), {total}, at::kLong);
  int64_t begin = 0;
  for (const at::Tensor* tensor : moved) {
    if (!tensor->defined()) continue;
    host.narrow(0, begin, tensor->numel()).copy_(*tensor);
    begin += tensor->numel();
  }
  const at::Tensor on_device = at::empty({total}, host.options().device(device));
  on_device.copy_(host, /*non_blocking=*/true);
  begin = 0;
  for (at::Tensor* tensor : moved) {
    if (!tensor->defined()) continue;
    *tensor = on_device.narrow(0, begin, tensor->numel());
    begin += tensor->numel();
  }
}

}  // namespace

DispatchPlan plan_dispatch(const at::Tensor& chosen, const DispatchOptions& options,
                           const ExpertGroups* groups) {
  const at::NoGradGuard no_grad;
  const at::Tensor experts = chosen.cpu();
  const ChoiceCounts counts(experts, options.num_experts, groups);
  const int64_t num_choices = counts.total();
  int64_t capacity = std::numeric_limits<int64_t>::max();
  if (options.capacity_factor) {
    const double wanted = std::ceil(*options.capacity_factor * static_cast<double>(num_choices) /
                                    static_cast<double>(options.num_experts));
    // The capacity is limited to the number of all choices, because a larger number may not fit
    // into an integer.
    capacity = static_cast<int64_t>(std::min(wanted, static_cast<double>(num_choices)));
  }
  const Processed processed =
      processed_within(capacity, counts, groups == nullptr ? 0 : groups->tokens.rank());
  DispatchPlan plan;
  plan.choices_of_expert = counts.of_experts();
  plan.num_tokens = num_choices / counts.num_selected();
  plan.num_dropped = num_choices - processed.total;
  order_own_choices(plan, experts, processed.of_own, options.num_experts);
  if (exchanges(groups)) {
    plan_exchange(plan, processed, counts, *groups);
  } else {
    const int64_t own_rank = groups == nullptr ? 0 : groups->tokens.rank();
    const auto begin = processed.of_ranks.begin() + own_rank * options.num_experts;
    plan.rows_of_expert.assign(begin, begin + options.num_experts);
  }
  move_to_device(plan, chosen.device());
  return plan;
}

at::Tensor send_to_experts(const at::Tensor& rows, const DispatchPlan& plan,
                           const ExpertGroups* groups) {
  if (!exchanges(groups)) return rows;
  return functional::all_to_all(
             rows, groups->experts,
             {.output_split_sizes = plan.received, .input_split_sizes = plan.sent})
      .index_select(0, plan.by_expert);
}

at::Tensor return_to_tokens(const at::Tensor& rows, const DispatchPlan& plan,
                            const ExpertGroups* groups) {
  if (!exchanges(groups)) return rows;
  return functional::all_to_all(
      rows.index_select(0, plan.by_rank), groups->experts,
      {.output_split_sizes = plan.sent, .input_split_sizes = plan.received});
}

}  // namespace cadre::parallel
