// Finds gradients with elements that are NaN or infinite, and makes one decision for all ranks
// about the step.
//
// Threads: one for the same gradients. Blocking: a collective of the ranks that hold the parameters
// in parts; no communication if every rank holds whole parameters. Lifetime: keeps nothing. Errors:
// kInvalidArgument, the same on all ranks, from NonFinitePolicy::kStop; errors of the group.
// To be called after backward() has reduced the gradients and before they are clipped: the factor
// of a NaN norm would make every gradient NaN.
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
  // The rank, in the group that was created first, that holds the part of the gradient with the
  // element; nullopt if every rank holds the whole gradient.
  std::optional<int> rank;
  friend bool operator==(const NonFiniteGradient&, const NonFiniteGradient&) = default;
};

// Returns the first parameter, in the order of the list, that has a gradient with a NaN or an
// infinity on any rank, and the lowest such rank. The result is the same on all ranks. nullopt if
// all gradients are finite. The list has the same parameters in the same order on all ranks.
CADRE_EXPORT std::optional<NonFiniteGradient> find_nonfinite_gradient(
    std::span<const ParameterShard> shards);

enum class NonFinitePolicy {
  kStop,      // throws an error
  kSkip,      // the step is left out on all ranks
  kContinue,  // the step is done, and the program decides what to do about it
};

struct NonFiniteOptions {
  NonFinitePolicy policy = NonFinitePolicy::kStop;
  int64_t step = 0;  // the number of the step in messages
  // Gets a warning if the policy does not throw. Null: the log of the group, on its rank 0; no log
  // for a list of parameters, or for shards in a world of one, where there is no group.
  LogSink* log = nullptr;
};

// Returns whether the optimizer should step; the same on all ranks. The caller clears the gradients
// of a skipped step.
CADRE_EXPORT bool check_gradients_finite(std::span<const ParameterShard> shards,
                                         const NonFiniteOptions& options = {});

// Takes parameters that each rank has whole, with the same gradients on all ranks.
CADRE_EXPORT std::optional<NonFiniteGradient> find_nonfinite_gradient(
    std::span<const NamedTensor> parameters);
CADRE_EXPORT bool check_gradients_finite(std::span<const NamedTensor> parameters,
                                         const NonFiniteOptions& options = {});

// Takes any wrapper, or a plain module.
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
