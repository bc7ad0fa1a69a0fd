#include "cadre/shard/grad_scaler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/wrap/shard_mark.h"

namespace cadre {

namespace {

// The smallest scale of which float32 holds the inverse, too.
constexpr double kSmallestScale = 0x1p-126;

void check_scale(double scale) {
  if (scale >= kSmallestScale && scale <= std::numeric_limits<float>::max()) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("GradScaler: the scale is {}; it must be between 2^-126 and 2^127", scale));
}

[[noreturn]] void refuse_order(std::string_view problem) {
  throw Error(ErrorCode::kInvalidArgument,
              format("GradScaler: {}. In each step call scale(loss).backward(), unscale_(), "
                     "step(optimizer) and update(), in this order",
                     problem));
}

// Each gradient once: a tied weight may be in a list twice.
std::vector<at::Tensor> distinct_gradients(std::span<const at::Tensor> parameters) {
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = parameters[i].grad();
    if (!gradient.defined()) continue;
    if (gradient.layout() != at::kStrided || !gradient.is_floating_point()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          format("GradScaler: the gradient of parameter {} of {} is {} of {}; only dense "
                 "gradients of a floating-point dtype are scaled",
                 i, parameters.size(), gradient.layout() == at::kStrided ? "dense" : "sparse",
                 c10::toString(gradient.scalar_type())));
    }
    const bool is_known = std::ranges::any_of(
        gradients, [&](const at::Tensor& known) { return known.is_same(gradient); });
    if (!is_known) gradients.push_back(gradient);
  }
  return gradients;
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options), state_{.scale = options.initial_scale} {
  check_scale(options.initial_scale);
  if (!(options.growth_factor > 1) || !(options.backoff_factor > 0) ||
      !(options.backoff_factor < 1) || options.growth_interval < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                format("GradScaler: growth_factor is {}, backoff_factor {} and growth_interval {}; "
                       "they must be > 1, between 0 and 1, and >= 1",
                       options.growth_factor, options.backoff_factor, options.growth_interval));
  }
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return loss.mul(state_.scale);
}

bool GradScaler::unscale_(std::span<const at::Tensor> parameters) {
  wrap::refuse_shards(parameters, "GradScaler::unscale_",
                      "Call unscale_(model) with the wrapper, which asks all ranks");
  return unscale_gradients(distinct_gradients(parameters));
}

bool GradScaler::unscale_(std::span<const ParameterShard> shards) {
  std::vector<at::Tensor> values;
  for (const ParameterShard& shard : shards) values.push_back(shard.values);
  const bool own = unscale_gradients(distinct_gradients(values));
  const std::vector<ProcessGroup> groups = dividing_groups(shards);
  if (groups.empty()) return own;
  const at::Tensor are_finite = at::full({1}, own ? 1 : 0, at::kInt);
  for (const ProcessGroup& group : groups) group.all_reduce(are_finite, {.op = ReduceOp::kMin});
  are_finite_ = are_finite.item<int>() == 1;
  return *are_finite_;
}

bool GradScaler::unscale_gradients(const std::vector<at::Tensor>& gradients) {
  if (are_finite_) refuse_order("unscale_() was called twice in one step");
  const at::NoGradGuard no_grad;
  at::Tensor num_found = at::zeros({1}, at::kFloat);
  const at::Tensor factor = at::full({1}, 1.0 / state_.scale, at::kFloat);
  if (!gradients.empty()) {
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, num_found, factor);
  }
  are_finite_ = num_found.item<float>() == 0;
  return *are_finite_;
}

bool GradScaler::may_step() const {
  if (!are_finite_) refuse_order("step() was called before unscale_()");
  return *are_finite_;
}

void GradScaler::update() {
  if (!are_finite_) refuse_order("update() was called before unscale_()");
  if (!*are_finite_) {
    state_ = {.scale = std::max(state_.scale * options_.backoff_factor, kSmallestScale)};
  } else if (++state_.num_good_steps == options_.growth_interval) {
    const double grown = state_.scale * options_.growth_factor;
    // A scale beyond float32 would make every scaled loss infinite.
    const bool fits = grown <= std::numeric_limits<float>::max();
    state_ = {.scale = fits ? grown : state_.scale};
  }
  are_finite_.reset();
}

void GradScaler::load_state(const State& state) {
  check_scale(state.scale);
  state_ = state;
  are_finite_.reset();
}

}  // namespace cadre
