#include "cadre/reduction/agreement/local_gradients.h"

#include <ATen/ops/count_nonzero.h>

#include <algorithm>
#include <utility>

namespace cadre::reduction {

namespace {

uint32_t version_of(const at::Tensor& gradient) {
  return gradient.is_inference() ? 0 : static_cast<uint32_t>(gradient._version());
}

}  // namespace

LocalGradients::LocalGradients(std::vector<at::Tensor> parameters, ForwardLedger& ledger)
    : parameters_(std::move(parameters)),
      ledger_(ledger),
      is_touched_(parameters_.size(), false),
      versions_(parameters_.size(), 0) {}

bool LocalGradients::contribute(size_t parameter) const {
  return is_touched_[parameter] && parameters_[parameter].grad().defined();
}

void LocalGradients::accumulate(const Forward* reached, std::optional<size_t> just_touched) {
  if (!std::exchange(is_in_backward_, true)) {
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

// At the end of a backward, because gradients of a backward that fails must not be reduced.
void LocalGradients::finish_backward() {
  is_in_backward_ = false;
  for (const CarriedForward& forward : std::exchange(carried_, {})) {
    num_samples_ += forward.num_samples;
    ledger_.set_accumulated(forward.number);
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (contribute(i)) versions_[i] = version_of(parameters_[i].grad());
  }
}

void LocalGradients::forget_if_cleared(std::optional<size_t> just_touched) {
  if (num_samples_ == 0 || !are_cleared(just_touched)) return;
  take_samples();
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
  if (version_of(gradient) == versions_[parameter] || gradient.layout() != at::kStrided) {
    return false;
  }
  return at::count_nonzero(gradient).item<int64_t>() == 0;
}

int64_t LocalGradients::take_samples() {
  ledger_.begin_accumulation();
  return std::exchange(num_samples_, 0);
}

}  // namespace cadre::reduction
