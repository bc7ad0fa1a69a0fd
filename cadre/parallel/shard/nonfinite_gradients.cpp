#include "cadre/parallel/shard/nonfinite_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>

#include <algorithm>
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

// Returns the index of the first gradient with an element that is not finite; the number of
// gradients if there is none. An undefined gradient has none. The host waits once for a device,
// however many of the gradients are on it.
size_t first_nonfinite(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> flags;  // those of gradients on a device
  std::vector<size_t> flagged;
  size_t first = gradients.size();
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    const at::Tensor is_finite = at::isfinite(gradients[i]).all();
    if (!is_finite.is_cpu()) {
      flags.push_back(flags.empty() ? is_finite : is_finite.to(flags.front().device()));
      flagged.push_back(i);
    } else if (!is_finite.item<bool>()) {
      first = i;
      break;
    }
  }
  if (flags.empty()) return first;
  const at::Tensor on_host = at::stack(flags).to(at::kCPU);
  for (size_t k = 0; k < flagged.size(); ++k) {
    if (!on_host.const_data_ptr<bool>()[k]) return std::min(first, flagged[k]);
  }
  return first;
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
  std::vector<at::Tensor> gradients;
  for (const ParameterShard& shard : shards) gradients.push_back(shard.values.grad());
  const auto first = static_cast<int64_t>(first_nonfinite(gradients));
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
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& tensor : tensors) gradients.push_back(tensor.grad());
  const size_t first = first_nonfinite(gradients);
  if (first == gradients.size()) return std::nullopt;
  return NonFiniteGradient{.parameter = parameters[first].name, .rank = std::nullopt};
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
