#include "cadre/parallel/shard/nonfinite_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>

#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/division/parameter_division.h"
#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/tensor/hooks/shard_mark.h"

namespace cadre {

namespace {

// More than any number of ranks, so that parameter index * kMaxRanks + rank identifies both in one
// integer.
constexpr int64_t kMaxRanks = int64_t{1} << 31;

bool is_finite(const at::Tensor& gradient) {
  return !gradient.defined() || at::isfinite(gradient).all().item<bool>();
}

std::string text_of(const NonFiniteGradient& found, int64_t step) {
  const std::string holder =
      found.rank ? format(", in the part that rank {} holds", *found.rank) : "";
  return format("step {}: the gradient of \"{}\" has an element that is NaN or infinite{}", step,
                found.parameter, holder);
}

bool decide(const std::optional<NonFiniteGradient>& found, const NonFiniteOptions& options) {
  if (!found) return true;
  if (options.policy == NonFinitePolicy::kStop) {
    throw Error(
        ErrorCode::kInvalidArgument,
        format("{}. Lower the learning rate or clip the gradients, and resume from the last "
               "snapshot; or leave out such steps with NonFinitePolicy::kSkip",
               text_of(*found, options.step)));
  }
  const bool is_skipped = options.policy == NonFinitePolicy::kSkip;
  if (options.log != nullptr) {
    options.log->write(
        LogLevel::kWarning, "gradients",
        format("{} effect=\"{}\"", text_of(*found, options.step),
               is_skipped ? "the step is left out on all ranks" : "the step is done"));
  }
  return !is_skipped;
}

}  // namespace

std::optional<NonFiniteGradient> find_nonfinite_gradient(std::span<const ParameterShard> shards) {
  if (shards.empty()) return std::nullopt;
  const at::NoGradGuard no_grad;
  const auto num_shards = static_cast<int64_t>(shards.size());
  int64_t first = 0;
  while (first < num_shards && is_finite(shards[first].values.grad())) ++first;
  const std::vector<ProcessGroup> groups = shard::dividing_groups(shards);
  if (groups.empty()) {
    if (first == num_shards) return std::nullopt;
    return NonFiniteGradient{.parameter = shards[first].name, .rank = std::nullopt};
  }
  // Each rank contributes a key from its first parameter with a non-finite gradient and its rank.
  // The minimum of the keys is the first such parameter of all ranks and the lowest rank that has
  // found it.
  const at::Tensor key =
      at::full({1}, first * kMaxRanks + groups[0].global_rank(groups[0].rank()), at::kLong);
  for (const ProcessGroup& group : groups) group.all_reduce(key, {.op = ReduceOp::kMin});
  const auto agreed = key.item<int64_t>();
  if (agreed / kMaxRanks == num_shards) return std::nullopt;
  return NonFiniteGradient{.parameter = shards[agreed / kMaxRanks].name,
                           .rank = static_cast<int>(agreed % kMaxRanks)};
}

std::optional<NonFiniteGradient> find_nonfinite_gradient(std::span<const NamedTensor> parameters) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& parameter : parameters) tensors.push_back(parameter.tensor);
  wrap::refuse_shards(tensors, "check_gradients_finite");
  const at::NoGradGuard no_grad;
  for (const NamedTensor& parameter : parameters) {
    if (is_finite(parameter.tensor.grad())) continue;
    return NonFiniteGradient{.parameter = parameter.name, .rank = std::nullopt};
  }
  return std::nullopt;
}

bool check_gradients_finite(std::span<const ParameterShard> shards,
                            const NonFiniteOptions& options) {
  shard::check_gradients_reduced("cadre::check_gradients_finite", shards);
  const std::optional<NonFiniteGradient> found = find_nonfinite_gradient(shards);
  if (!found || options.log != nullptr) return decide(found, options);
  NonFiniteOptions with_log = options;
  const std::vector<ProcessGroup> groups = shard::dividing_groups(shards);
  // The log lives as long as the group.
  if (!groups.empty() && groups[0].rank() == 0) {
    with_log.log = groups[0].communicator().options().log.get();
  }
  return decide(found, with_log);
}

bool check_gradients_finite(std::span<const NamedTensor> parameters,
                            const NonFiniteOptions& options) {
  return decide(find_nonfinite_gradient(parameters), options);
}

}  // namespace cadre
