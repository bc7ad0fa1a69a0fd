#include "cadre/train/trainer/strategy/scalar_sum.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "cadre/core/os/defaults.h"

namespace cadre::train {

void ScalarSum::add(const at::Tensor& value, double weight) {
  if (value.is_cpu()) {
    on_host_ += value.item<double>() * weight;
    return;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor term = value.detach().to(at::kDouble).reshape({}) * weight;
  on_device_ = on_device_.defined() ? on_device_ + term : term;
}

void ScalarSum::begin_copy() {
  if (!on_device_.defined() || end_of_copy_) return;
  pinned_ = at::empty({}, at::TensorOptions(at::kDouble).pinned_memory(true));
  pinned_.copy_(on_device_, /*non_blocking=*/true);
  end_of_copy_ = device::StreamPoint::on_current_stream(on_device_.device());
}

double ScalarSum::value(os::System& system) {
  begin_copy();
  if (!end_of_copy_) return on_host_;
  end_of_copy_->wait(system, system.deadline_in(kDefaultOperationTimeout)).value_or_throw();
  return on_host_ + pinned_.item<double>();
}

}  // namespace cadre::train
