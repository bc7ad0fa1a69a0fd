#include "cadre/parallel/pp/tied_parameters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

namespace cadre::parallel {

TiedParameters::TiedParameters(ProcessGroup group, Holders holders)
    : group_(std::move(group)), holders_(std::move(holders)) {}

bool TiedParameters::is_holder() const {
  return !holders_.own.empty();
}

at::Tensor TiedParameters::from_root(const at::Tensor& tensor) const {
  if (group_.rank() != holders_.root) {
    const at::Tensor received = at::empty_like(tensor, at::MemoryFormat::Contiguous);
    group_.recv(received, holders_.root);
    return received;
  }
  for (const int rank : holders_.ranks) {
    if (rank != holders_.root) group_.send(tensor, rank);
  }
  return tensor;
}

void TiedParameters::broadcast() const {
  if (!is_holder()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor values = from_root(holders_.own[0].detach());
  for (const at::Tensor& parameter : holders_.own) {
    if (parameter.data_ptr() != values.data_ptr()) parameter.copy_(values);
  }
}

void TiedParameters::sum_gradients() const {
  if (!is_holder()) return;
  const at::NoGradGuard no_grad;
  at::Tensor sum = at::zeros_like(holders_.own[0], at::MemoryFormat::Contiguous);
  for (const at::Tensor& parameter : holders_.own) {
    if (parameter.grad().defined()) sum.add_(parameter.grad());
  }
  if (group_.rank() != holders_.root) {
    group_.send(sum, holders_.root);
  } else {
    const at::Tensor received = at::empty_like(sum);
    for (const int rank : holders_.ranks) {
      if (rank == holders_.root) continue;
      group_.recv(received, rank);
      sum.add_(received);
    }
  }
  sum = from_root(sum);
  for (const at::Tensor& parameter : holders_.own) {
    if (parameter.requires_grad()) parameter.mutable_grad() = sum.clone();
  }
}

bool TiedParameters::are_equal() const {
  if (!is_holder()) return true;
  const at::NoGradGuard no_grad;
  const at::Tensor values = from_root(holders_.own[0].detach());
  return std::ranges::all_of(
      holders_.own, [&](const at::Tensor& parameter) { return at::equal(parameter, values); });
}

}  // namespace cadre::parallel
