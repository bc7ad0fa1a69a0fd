#include "cadre/parallel/reduction/agreement/local_gradients.h"

#include <ATen/ops/count_nonzero.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "cadre/tensor/group/backward/backward_collectives.h"
#include "cadre/tensor/hooks/tensor_version.h"

namespace cadre::reduction {

LocalGradients::LocalGradients(std::vector<at::Tensor> parameters, ForwardLedger& ledger,
                               std::function<void()> on_accumulated)
    : parameters_(std::move(parameters)),
      ledger_(ledger),
      is_touched_(parameters_.size(), false),
      on_accumulated_(std::move(on_accumulated)),
      seen_(parameters_.size()) {}

std::optional<LocalGradients::Seen> LocalGradients::seen_now(size_t parameter) const {
  const at::Tensor& gradient = parameters_[parameter].grad();
  if (!gradient.defined()) return std::nullopt;
  return Seen{.tensor = c10::weak_intrusive_ptr<c10::TensorImpl>(gradient.getIntrusivePtr()),
              .version = wrap::version_of(gradient)};
}

bool LocalGradients::is_changed(size_t parameter) const {
  const at::Tensor& gradient = parameters_[parameter].grad();
  if (!gradient.defined()) return false;
  const std::optional<Seen>& seen = seen_[parameter];
  return !seen || seen->tensor._unsafe_get_target() != gradient.unsafeGetTensorImpl() ||
         seen->version != wrap::version_of(gradient);
}

void LocalGradients::set_reduced() {
  is_touched_.assign(parameters_.size(), false);
  for (size_t i = 0; i < parameters_.size(); ++i) seen_[i] = seen_now(i);
}

bool LocalGradients::contribute(size_t parameter) const {
  return is_touched_[parameter] && parameters_[parameter].grad().defined();
}

void LocalGradients::accumulate(const Forward* reached, std::optional<size_t> just_touched) {
  if (!std::exchange(is_in_backward_, true)) {
    backward_ = current_backward();
    forget_if_cleared(just_touched);
    wrap::at_end_of_backward([this] { finish_backward(); },
                             [this] {
                               is_in_backward_ = false;
                               carried_.clear();
                             });
  } else if (reached == nullptr) {
    return;
  }
  for (const CarriedForward& forward : ledger_.take(reached, {.is_accumulated = true})) {
    if (std::ranges::find(carried_, forward.number, &CarriedForward::number) == carried_.end()) {
      carried_.push_back(forward);
    }
  }
}

// Called at the end of a backward, because gradients of a backward that fails must not be reduced.
void LocalGradients::finish_backward() {
  is_in_backward_ = false;
  for (const CarriedForward& forward : std::exchange(carried_, {})) {
    if (!forward.is_counted) samples_.push_back(forward.num_samples);
    ledger_.set_accumulated(forward.number);
  }
  for (std::vector<int>& ranks : collectives_since(backward_)) {
    collectives_.push_back(std::move(ranks));
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (contribute(i)) seen_[i] = seen_now(i);
  }
  on_accumulated_();
}

void LocalGradients::forget_if_cleared(std::optional<size_t> just_touched) {
  if (samples_.empty() || !are_cleared(just_touched)) return;
  take_samples();
  take_collectives();
  for (size_t i = 0; i < parameters_.size(); ++i) is_touched_[i] = just_touched == i;
}

bool LocalGradients::are_cleared(std::optional<size_t> just_touched) const {
  size_t num_cleared = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_touched_[i] || just_touched == i) continue;
    if (parameters_[i].grad().defined() && !is_changed_to_zeros(i)) return false;
    ++num_cleared;
  }
  return num_cleared > 0;
}

bool LocalGradients::is_changed_to_zeros(size_t parameter) const {
  const at::Tensor& gradient = parameters_[parameter].grad();
  if (!is_changed(parameter) || gradient.layout() != at::kStrided) return false;
  return at::count_nonzero(gradient).item<int64_t>() == 0;
}

int64_t LocalGradients::take_samples() {
  ledger_.begin_accumulation();
  const std::vector<int64_t> samples = std::exchange(samples_, {});
  return std::accumulate(samples.begin(), samples.end(), int64_t{0});
}

}  // namespace cadre::reduction
