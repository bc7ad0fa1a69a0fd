#include "cadre/parallel/buckets/unreduced_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/tensor/hooks/parameter_watch.h"
#include "cadre/tensor/hooks/tensor_version.h"

namespace cadre {

namespace {

std::vector<at::Tensor> tensors_of(const std::vector<NamedTensor>& parameters) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& parameter : parameters) tensors.push_back(parameter.tensor);
  return tensors;
}

bool has_only_zeros(const at::Tensor& gradient) {
  return at::count_nonzero(gradient).item<int64_t>() == 0;
}

// Fills the gradient with -0.0 if all its elements are zeros. The host does not wait for a device.
void unsign_zeros(const at::Tensor& gradient) {
  if (!gradient.is_cpu()) {
    const at::Tensor has_others = at::count_nonzero(gradient).ne(0);
    gradient.copy_(at::where(has_others, gradient, at::full_like(gradient, -0.0)));
  } else if (has_only_zeros(gradient)) {
    gradient.fill_(-0.0);
  }
}

}  // namespace

UnreducedGradients::UnreducedGradients(const std::vector<NamedTensor>& parameters,
                                       std::string place, Shards shards)
    : parameters_(parameters),
      place_(std::move(place)),
      shards_(std::move(shards)),
      locals_(parameters_.size()),
      hooks_(tensors_of(parameters_),
             [this](size_t parameter) { locals_[parameter].is_arriving = true; }) {}

void UnreducedGradients::keep(size_t parameter) {
  const at::NoGradGuard no_grad;
  Local& local = locals_[parameter];
  at::Tensor leaf = shards_.leaf(parameter);
  at::Tensor& gradient = leaf.mutable_grad();
  if (!gradient.defined()) {
    gradient = shards_.memory(parameter);
    gradient.fill_(-0.0);
    local.is_placeholder = true;
  } else if (!local.is_kept) {
    unsign_zeros(gradient);
  }
  if (!local.is_kept && shards_.refuses_changed_values) local.values = values_of(parameter);
  local.shown = gradient.unsafeGetTensorImpl();
  local.version = wrap::version_of(gradient);
  local.is_kept = true;
  local.is_arriving = false;
}

void UnreducedGradients::end(size_t parameter) {
  const Local local = std::exchange(locals_[parameter], Local{});
  if (!local.is_placeholder) return;
  at::Tensor leaf = shards_.leaf(parameter);
  at::Tensor& gradient = leaf.mutable_grad();
  if (gradient.defined() && gradient.unsafeGetTensorImpl() == local.shown &&
      wrap::version_of(gradient) == local.version) {
    gradient.reset();
  }
}

// Does not reset a placeholder of RefusedGradients, because it is no gradient.
void UnreducedGradients::drop(size_t parameter) {
  if (!shards_.is_refused(parameter)) parameters_[parameter].tensor.mutable_grad().reset();
  end(parameter);
}

UnreducedGradients::Shown UnreducedGradients::shown(size_t parameter) const {
  const Local& local = locals_[parameter];
  const at::Tensor gradient = shards_.leaf(parameter).grad();
  if (!gradient.defined()) return Shown::kCleared;
  if (gradient.unsafeGetTensorImpl() == local.shown &&
      wrap::version_of(gradient) == local.version) {
    return Shown::kUnchanged;
  }
  // A gradient without elements counts as cleared. If the program has changed the gradient instead,
  // the ranks that own elements of the parameter throw.
  const bool is_cleared = has_only_zeros(gradient) && !gradient.signbit().any().item<bool>();
  return is_cleared ? Shown::kCleared : Shown::kChanged;
}

void UnreducedGradients::review(size_t parameter) {
  if (changed_ == parameter) change_.reset();
  const at::Tensor& gradient = parameters_[parameter].tensor.grad();
  Local& local = locals_[parameter];
  if (!local.is_kept) {
    if (!gradient.defined()) {
      local.is_arriving = false;
    } else if (local.is_arriving) {
      drop(parameter);  // a backward that threw has left it
    } else if (!shards_.is_refused(parameter)) {
      keep(parameter);  // the program has assigned the gradient
    }
    return;
  }
  if (!gradient.defined()) {
    // The module's zero_grad() has cleared the gradient of the parameter. It does not know the
    // shard, so the gradient of the shard is cleared here.
    shards_.leaf(parameter).mutable_grad().reset();
    local = Local{};
    shards_.on_cleared();
    return;
  }
  switch (shown(parameter)) {
    case Shown::kUnchanged:
      if (!shards_.refuses_changed_values || values_of(parameter) == local.values) return;
      return set_changed(
          parameter, "this rank's shard",
          "was written, by the step of an optimizer for example, although a gradient of a "
          "backward() under no_sync() was not reduced to it yet: an optimizer has seen zeros "
          "instead. Step, and load values, after the gradients were reduced (by a backward() "
          "without no_sync(), or by reduce_gradients()) or cleared");
    case Shown::kCleared:
      drop(parameter);
      return shards_.on_cleared();
    case Shown::kChanged:
      return set_changed(
          parameter, "the gradient of this rank's shard",
          "was changed in place after a backward() under no_sync(), whose gradients are not "
          "reduced to it yet, so the change would not apply to these. Scale or clip gradients "
          "after they were reduced (by a backward() without no_sync(), or by reduce_gradients())");
  }
}

void UnreducedGradients::set_changed(size_t parameter, const std::string& what,
                                     const std::string& problem) {
  change_ = Error(ErrorCode::kInvalidArgument,
                  format("{}: {} of \"{}\" {}; clear the gradients to continue", place_, what,
                         parameters_[parameter].name, problem));
  changed_ = parameter;
}

// Does not throw for gradients that were left by a backward that threw, because the next review()
// drops them.
void UnreducedGradients::check_complete(size_t parameter) const {
  const Local& local = locals_[parameter];
  if (!parameters_[parameter].tensor.grad().defined() || shards_.is_refused(parameter)) return;
  if (local.is_kept ? shown(parameter) == Shown::kCleared : local.is_arriving) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      format("{}: \"{}\" has a gradient that was not reduced yet, from a backward() under "
             "no_sync() or assigned by the program. The gradient of this rank's shard does not "
             "contain it, so a step, a norm or clipping would miss it. Before these, run a "
             "backward() without no_sync() or call reduce_gradients(), or clear the gradients",
             place_, parameters_[parameter].name));
}

UnreducedGradients::Values UnreducedGradients::values_of(size_t parameter) const {
  const wrap::WriteWatch watch({{.name = {}, .tensor = shards_.leaf(parameter)}});
  return {.version = watch.num_writes(), .sample = watch.samples()};
}

void UnreducedGradients::review_all(std::optional<size_t> except) {
  if (except != changed_) change_.reset();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (except != i) review(i);
  }
}

void UnreducedGradients::throw_if_changed() {
  if (change_) throw *std::exchange(change_, std::nullopt);
}

}  // namespace cadre
