#include "cadre/parallel/shard/grad_scaler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/division/parameter_division.h"
#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/caught_error.h"
#include "cadre/tensor/hooks/shard_mark.h"

namespace cadre {

namespace {

// The smallest scale: float32 can represent both it and its inverse.
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

struct ScaledGradient {
  std::string name;  // the name of its parameter, for messages
  at::Tensor gradient;
};

// Returns each gradient once, because a tied weight may be in the list twice and must be divided
// once.
std::vector<ScaledGradient> distinct_gradients(std::span<const NamedTensor> parameters) {
  std::vector<ScaledGradient> gradients;
  for (const auto& [name, parameter] : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    if (gradient.layout() != at::kStrided || !gradient.is_floating_point()) {
      throw Error(ErrorCode::kInvalidArgument,
                  format("GradScaler: the gradient of {} is {} of {}; only dense gradients of a "
                         "floating-point dtype are scaled",
                         name, gradient.layout() == at::kStrided ? "dense" : "sparse",
                         c10::toString(gradient.scalar_type())));
    }
    const bool is_known = std::ranges::any_of(
        gradients, [&](const ScaledGradient& known) { return known.gradient.is_same(gradient); });
    if (!is_known) gradients.push_back({name, gradient});
  }
  return gradients;
}

std::vector<at::Tensor> tensors_of(const std::vector<ScaledGradient>& scaled) {
  std::vector<at::Tensor> tensors;
  for (const ScaledGradient& one : scaled) tensors.push_back(one.gradient);
  return tensors;
}

// Returns the values of tensors of one element. The host waits once, however many of them are on a
// device.
template <typename T>
std::vector<T> values_on_host(std::vector<at::Tensor> tensors) {
  if (tensors.empty()) return {};
  for (at::Tensor& tensor : tensors)
    tensor = tensor.to(tensors.front().device()).view(at::IntArrayRef());
  const at::Tensor on_host = at::stack(tensors).to(at::kCPU);
  const T* const values = on_host.const_data_ptr<T>();
  return {values, values + on_host.numel()};
}

// Throws for a float16 gradient that division by the scale would round to 0, or to fewer digits
// than float16 has. The host waits once for a device.
void check_representable(const std::vector<ScaledGradient>& scaled, double scale) {
  constexpr double kSmallestNormal = 0x1p-14;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> counts;
  std::vector<size_t> counted;
  for (size_t i = 0; i < scaled.size(); ++i) {
    const at::Tensor& gradient = scaled[i].gradient;
    if (gradient.scalar_type() != at::kHalf) continue;
    const at::Tensor exact = gradient.to(at::kFloat).mul_(1.0 / scale);
    const at::Tensor is_lost =
        exact.abs().lt(kSmallestNormal).logical_and_(exact.to(at::kHalf).to(at::kFloat).ne(exact));
    counts.push_back(is_lost.sum());
    counted.push_back(i);
  }
  const std::vector<int64_t> on_host = values_on_host<int64_t>(counts);
  for (size_t k = 0; k < counted.size(); ++k) {
    const auto& [name, gradient] = scaled[counted[k]];
    const int64_t num_lost = on_host[k];
    if (num_lost == 0) continue;
    throw Error(ErrorCode::kInvalidArgument,
                format("GradScaler: the gradient of {} is Half, and {} of its {} elements, divided "
                       "by the scale of {}, are too small for float16: they would be rounded to 0 "
                       "or lose digits, which is what the scale is to prevent. Keep the parameters "
                       "in float32, and compute in float16 with cadre::Autocast",
                       name, num_lost, gradient.numel(), scale));
  }
}

// Multiplies the gradients by `by`, in place. Returns tensors of one element, one for each kernel
// call, that are not zero if an element was not finite. The kernel of a device takes gradients of
// that device and of one dtype; the CPU's takes all dtypes.
std::vector<at::Tensor> multiply(const std::vector<at::Tensor>& gradients, double by) {
  const at::NoGradGuard no_grad;
  std::vector<std::vector<at::Tensor>> calls;
  for (const at::Tensor& gradient : gradients) {
    const auto same = std::ranges::find_if(calls, [&](const std::vector<at::Tensor>& list) {
      const at::Tensor& first = list.front();
      return first.device() == gradient.device() &&
             (first.is_cpu() || first.scalar_type() == gradient.scalar_type());
    });
    if (same == calls.end()) {
      calls.push_back({gradient});
    } else {
      same->push_back(gradient);
    }
  }
  std::vector<at::Tensor> num_found;
  for (const std::vector<at::Tensor>& list : calls) {
    const at::TensorOptions options = list.front().options().dtype(at::kFloat);
    at::Tensor& found = num_found.emplace_back(at::zeros({1}, options));
    at::_amp_foreach_non_finite_check_and_unscale_(list, found, at::full({1}, by, options));
  }
  return num_found;
}

bool are_zero(const std::vector<at::Tensor>& num_found) {
  return std::ranges::all_of(values_on_host<float>(num_found),
                             [](float found) { return found == 0; });
}

// The results of one rank or, after findings_of_all(), of all ranks: whether all gradients are
// finite, whether a check has failed, and the smallest and the largest scale.
struct CommonFindings {
  bool are_finite = true;
  bool is_refused = false;
  double least_scale = 0;
  double largest_scale = 0;
};

// Reduces the findings of the ranks of these groups, with one all_reduce(min) for each group.
// Scales are sent as the integers with their bits: positive doubles and these integers have the
// same order.
CommonFindings findings_of_all(const CommonFindings& own, std::span<const ProcessGroup> groups) {
  const at::Tensor least = at::empty({4}, at::kLong);
  auto* const values = least.mutable_data_ptr<int64_t>();
  values[0] = own.are_finite ? 1 : 0;
  values[1] = own.is_refused ? 0 : 1;
  values[2] = std::bit_cast<int64_t>(own.least_scale);
  values[3] = -std::bit_cast<int64_t>(own.largest_scale);
  for (const ProcessGroup& group : groups) group.all_reduce(least, {.op = ReduceOp::kMin});
  return {.are_finite = values[0] == 1,
          .is_refused = values[1] == 0,
          .least_scale = std::bit_cast<double>(values[2]),
          .largest_scale = std::bit_cast<double>(-values[3])};
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options), state_{.scale = options.initial_scale} {
  check_scale(options.initial_scale);
  if (!(options.growth_factor > 1) || !(options.backoff_factor > 0) ||
      !(options.backoff_factor < 1) || options.growth_interval < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                format("GradScaler: growth_factor is {} and must be > 1, backoff_factor is {} and "
                       "must be between 0 and 1, growth_interval is {} and must be >= 1",
                       options.growth_factor, options.backoff_factor, options.growth_interval));
  }
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return loss.mul(state_.scale);
}

bool GradScaler::unscale_(std::span<const at::Tensor> parameters) {
  wrap::refuse_shards(parameters, "GradScaler::unscale_");
  check_order();
  std::vector<NamedTensor> named;
  for (const at::Tensor& parameter : parameters) {
    named.push_back({format("parameter {} of {}", named.size(), parameters.size()), parameter});
  }
  const std::vector<ScaledGradient> gradients = distinct_gradients(named);
  check_representable(gradients, state_.scale);
  are_finite_ = are_zero(multiply(tensors_of(gradients), 1.0 / state_.scale));
  return *are_finite_;
}

bool GradScaler::unscale_(std::span<const ParameterShard> shards) {
  check_order();
  shard::check_gradients_reduced("cadre::GradScaler::unscale_", shards);
  std::vector<at::Tensor> gradients;
  std::optional<Error> refusal;
  CommonFindings own{.least_scale = state_.scale, .largest_scale = state_.scale};
  try {
    std::vector<NamedTensor> named;
    for (const ParameterShard& shard : shards) {
      named.push_back({format("\"{}\"", shard.name), shard.values});
    }
    const std::vector<ScaledGradient> scaled = distinct_gradients(named);
    check_representable(scaled, state_.scale);
    gradients = tensors_of(scaled);
    // Multiplying by 1 only finds out whether they are finite.
    own.are_finite = are_zero(multiply(gradients, 1.0));
  } catch (...) {
    refusal = caught_error();
    own.is_refused = true;
  }
  const std::vector<ProcessGroup> groups = shard::dividing_groups(shards);
  const CommonFindings found = findings_of_all(own, groups);
  if (found.is_refused) {
    const auto common = common_refusal(groups, "GradScaler::unscale_", [&refusal] {
      if (refusal) throw *refusal;
    });
    throw common.value_or(Error(
        ErrorCode::kInternal,
        "GradScaler: another rank reported an error, but no rank has one; please report this bug"));
  }
  if (found.least_scale != found.largest_scale) {
    throw Error(ErrorCode::kInvalidArgument,
                format("GradScaler: the ranks have scales from {} to {}; give all ranks the same "
                       "options and the same state, and call scale() and update() on all of them",
                       found.least_scale, found.largest_scale));
  }
  (void)multiply(gradients, 1.0 / state_.scale);
  are_finite_ = found.are_finite;
  return *are_finite_;
}

void GradScaler::check_order() const {
  if (are_finite_) refuse_order("unscale_() was called twice in one step");
}

bool GradScaler::may_step() const {
  if (!are_finite_) refuse_order("step() was called before unscale_()");
  return *are_finite_;
}

void GradScaler::update() {
  if (!are_finite_) refuse_order("update() was called before unscale_()");
  if (!*are_finite_) {
    state_ = {.scale = std::max(state_.scale * options_.backoff_factor, kSmallestScale)};
  } else if (++state_.num_good_steps >= options_.growth_interval) {
    const double grown = state_.scale * options_.growth_factor;
    // If float32 could not represent the scale, every scaled loss would be infinite.
    const bool fits = grown <= std::numeric_limits<float>::max();
    state_ = {.scale = fits ? grown : state_.scale};
  }
  are_finite_.reset();
}

void GradScaler::load_state(const State& state) {
  check_scale(state.scale);
  if (state.num_good_steps < 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        format("GradScaler: num_good_steps is {}; expected 0 or more", state.num_good_steps));
  }
  state_ = state;
  are_finite_.reset();
}

}  // namespace cadre
