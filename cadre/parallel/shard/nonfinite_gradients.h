// Finds gradients with elements that are NaN or infinite, and decides, equally on all ranks, what
// happens to the step.
//
// Blocking: a collective of the ranks that own the shards; no communication if every rank has whole
// gradients. Errors: kInvalidArgument, the same on all ranks, from NonFinitePolicy::kStop; errors
// of the group. Call these functions after backward() has reduced the gradients and before
// clip_grad_norm_(): if one element is NaN, the norm is NaN, and clipping would make every gradient
// NaN.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "cadre/core/base/export.h"
#include "cadre/core/base/log.h"
#include "cadre/parallel/shard/model_gradients.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

struct NonFiniteGradient {
  std::string parameter;
  // The rank whose shard of the gradient has the element, as its number in the world; nullopt if
  // every rank has the whole gradient.
  std::optional<int> rank;
  friend bool operator==(const NonFiniteGradient&, const NonFiniteGradient&) = default;
};

// Returns the first parameter of the list whose gradient has a NaN or an infinity on any rank, and
// the lowest rank on which it has one; nullopt if all gradients are finite. The result is the same
// on all ranks. The list must have the same parameters in the same order on all ranks.
CADRE_EXPORT std::optional<NonFiniteGradient> find_nonfinite_gradient(
    std::span<const ParameterShard> shards);

enum class NonFinitePolicy {
  kStop,      // an error is thrown on all ranks
  kSkip,      // the step is skipped on all ranks
  kContinue,  // the step is done, and the program decides what to do about it
};

struct NonFiniteOptions {
  NonFinitePolicy policy = NonFinitePolicy::kStop;
  int64_t step = 0;  // the number of the step in messages
  // The log for a warning if the policy does not throw. If null, rank 0 writes to the log of its
  // group; without a group, as for a list of parameters or in a world of one rank, there is no
  // warning.
  LogSink* log = nullptr;
};

// Returns whether the optimizer should make its step, equally on all ranks. If it should not, the
// caller clears the gradients.
CADRE_EXPORT bool check_gradients_finite(std::span<const ParameterShard> shards,
                                         const NonFiniteOptions& options = {});

// These overloads take parameters with whole gradients, which are equal on all ranks. They throw
// kInvalidArgument for a shard, because each rank would find only what its own shard has.
CADRE_EXPORT std::optional<NonFiniteGradient> find_nonfinite_gradient(
    std::span<const NamedTensor> parameters);
CADRE_EXPORT bool check_gradients_finite(std::span<const NamedTensor> parameters,
                                         const NonFiniteOptions& options = {});

// Takes any wrapper, or a plain module. For a module that parallelize_module() has divided, also
// within DistributedDataParallel, pass the ParameterShards that it returned.
template <HasGradients Model>
bool check_gradients_finite(Model& model, const NonFiniteOptions& options = {}) {
  return shard::with_gradients_of(
      model,
      [&](std::span<const ParameterShard> shards) {
        return check_gradients_finite(shards, options);
      },
      [&](auto& whole) {
        const std::vector<NamedTensor> parameters = shard::named_parameters_of(whole);
        NonFiniteOptions with_log = options;
        if constexpr (requires { wrap::LocatedGroup(whole.process_group()); }) {
          const wrap::LocatedGroup group = whole.process_group();
          if (with_log.log == nullptr && group.rank() == 0) with_log.log = &group.log_sink();
        }
        return check_gradients_finite(std::span<const NamedTensor>(parameters), with_log);
      });
}

}  // namespace cadre
