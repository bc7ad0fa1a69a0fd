#include "cadre/parallel/buckets/replicated_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/parallel/buckets/gradient_memory.h"
#include "cadre/parallel/buckets/handed_out_memory.h"
#include "cadre/tensor/device/stream_point.h"
#include "cadre/tensor/hooks/device_check.h"

namespace cadre {

namespace {

// Returns the part of the bucket at `offset` as a gradient of the parameter. It has the parameter's
// strides, because libtorch accumulates without a copy only then, and its fused optimizers assume
// it. variable_data() makes it no view for autograd, because zero_grad() of optimizers calls
// detach_(), which throws for views.
at::Tensor gradient_like(const at::Tensor& parameter, const at::Tensor& flat, int64_t offset) {
  if (parameter.is_non_overlapping_and_dense()) {
    return flat.as_strided(parameter.sizes(), parameter.strides(), flat.storage_offset() + offset)
        .variable_data();
  }
  return flat.narrow(0, offset, parameter.numel()).view(parameter.sizes()).variable_data();
}

// Returns whether the gradient has the memory and the strides of the view.
bool lies_in(const at::Tensor& gradient, const at::Tensor& view) {
  return gradient.const_data_ptr() == view.const_data_ptr() && gradient.strides() == view.strides();
}

}  // namespace

ReplicatedGradients::ReplicatedGradients(std::vector<NamedTensor> parameters,
                                         wrap::LocatedGroup group, const Options& options)
    : GradientStorage(std::move(parameters)),
      group_(std::move(group)),
      device_(parameters_.front().tensor.device()),
      caps_(options.caps),
      trailer_numel_(options.trailer_numel) {
  if (options.hook) {
    hook_name_ = options.hook->name();
    hook_ = options.hook->make_state();
  }
  const std::vector<ParameterSize> sizes = sizes_of(parameters_);
  if (options.layout) check_layout_fits(*options.layout, sizes);
  is_learned_ = options.layout.has_value();
  set_layout(
      options.layout.value_or(plan_bucket_layout(sizes, reverse_order(sizes.size()), caps_)));
  if (!is_trailer_in_bucket()) buffers_.trailer = group_.empty_flat(trailer_numel_, at::kFloat);
  wrap::make_on_all_ranks(group_.process_group(), "the buckets of gradients", device_,
                          [this] { buffers_ = allocate(layout()); });
}

ReplicatedGradients::Buffers ReplicatedGradients::allocate(const BucketLayout& layout) {
  const at::NoGradGuard no_grad;
  Buffers buffers{.flats = {}, .views = std::vector<at::Tensor>(parameters_.size()), .trailer = {}};
  for (const auto& [numel, dtype] : replicated_buffers(
           layout, sizes_of(parameters_), is_trailer_in_bucket() ? trailer_numel_ : 0)) {
    const BucketLayout::Bucket& bucket = layout.buckets[buffers.flats.size()];
    const at::Tensor flat = group_.empty_flat(numel, dtype, device_);
    int64_t offset = 0;
    for (const int64_t index : bucket.parameters) {
      buffers.views[index] = gradient_like(parameters_[index].tensor, flat, offset);
      offset += parameters_[index].tensor.numel();
    }
    if (&bucket == &layout.buckets.back()) {
      buffers.trailer =
          is_trailer_in_bucket() ? flat.narrow(0, offset, trailer_numel_) : buffers_.trailer;
    }
    buffers.flats.push_back(flat);
  }
  return buffers;
}

void ReplicatedGradients::on_begin_pass() {
  untouched_.clear();
  for (size_t bucket = 0; bucket < num_buckets(); ++bucket) {
    if (is_handed_out(bucket)) take_back(bucket);
  }
}

// Returns whether the view is still the parameter's gradient. Autograd adds to such a gradient in
// place, so it need not be protected from changes.
bool ReplicatedGradients::is_in_use(size_t parameter) const {
  return parameters_[parameter].tensor.grad().is_same(buffers_.views[parameter]);
}

bool ReplicatedGradients::is_handed_out(size_t bucket) const {
  const std::vector<int64_t>& members = layout().buckets[bucket].parameters;
  bool has_unused = false;
  for (const int64_t parameter : members) {
    const auto index = static_cast<size_t>(parameter);
    if (is_in_use(index)) continue;
    has_unused = true;
    if (buffers_.views[index].use_count() > 1) return true;
  }
  const bool has_trailer = is_trailer_in_bucket() && bucket + 1 == num_buckets();
  const size_t num_own = 1 + members.size() + (has_trailer ? 1 : 0);
  return has_unused && flat(bucket).storage().use_count() > num_own;
}

// Takes the memory of the bucket back from gradients that the program holds, which get a copy.
// Gradients that are still in use keep the memory of the bucket, and stay the same tensors.
void ReplicatedGradients::take_back(size_t bucket) {
  const at::NoGradGuard no_grad;
  at::Tensor& flat = buffers_.flats[bucket];
  flat = take_memory_back(flat);
  int64_t offset = 0;
  for (const int64_t parameter : layout().buckets[bucket].parameters) {
    const auto index = static_cast<size_t>(parameter);
    at::Tensor& view = buffers_.views[index];
    if (is_in_use(index)) {
      view.unsafeGetTensorImpl()->set_storage_keep_dtype(flat.storage());
    } else {
      view = gradient_like(parameters_[index].tensor, flat, offset);
    }
    offset += parameters_[index].tensor.numel();
  }
  if (is_trailer_in_bucket() && bucket + 1 == num_buckets()) {
    buffers_.trailer = flat.narrow(0, offset, trailer_numel_);
  }
}

// Returns nullopt on all ranks if a rank's device has not enough memory. Memory of the host is
// allocated by all ranks together, so there all of them throw.
std::optional<ReplicatedGradients::Buffers> ReplicatedGradients::allocate_together(
    const BucketLayout& layout) {
  if (device_.is_cpu()) return allocate(layout);
  std::optional<Buffers> buffers;
  try {
    buffers = allocate(layout);
  } catch (const c10::Error&) {
    // The other ranks learn of it by the flag.
  }
  const at::Tensor has_memory = at::full({1}, buffers ? 1 : 0, at::TensorOptions(at::kInt));
  group_.all_reduce(has_memory, ReduceOp::kMin);
  if (*has_memory.const_data_ptr<int32_t>() == 0) buffers.reset();
  return buffers;
}

// All ranks keep the old buckets if the device of one has no memory for both.
void ReplicatedGradients::learn(std::span<const int64_t> order) {
  is_learned_ = true;
  const BucketLayout learned = plan_bucket_layout(sizes_of(parameters_), order, caps_);
  if (learned == layout()) return;
  const at::NoGradGuard no_grad;
  std::optional<Buffers> buffers = allocate_together(learned);
  if (!buffers) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (!gradient.defined()) continue;
    buffers->views[i].copy_(gradient);
    gradient = buffers->views[i];
  }
  for (const at::Tensor& flat : buffers_.flats) device::hold_for_current_stream(flat);
  buffers_ = *std::move(buffers);
  set_layout(learned);
}

// A hook computes a sum, so a mean is divided before.
double ReplicatedGradients::weight() const {
  const bool is_divided = hook_ != nullptr && combination_.op == ReduceOp::kAvg;
  return combination_.factor / (is_divided ? group_.world_size() : 1);
}

// Multiplies this rank's gradient by its factor and writes it into the bucket. parameter.grad()
// becomes the view of the bucket. If there is no gradient, writes zeros.
void ReplicatedGradients::place(size_t parameter) {
  const at::NoGradGuard no_grad;
  const at::Tensor& view = buffers_.views[parameter];
  at::Tensor& gradient = parameters_[parameter].tensor.mutable_grad();
  if (!gradient.defined()) {
    view.zero_();
    return;
  }
  const bool is_in_place = lies_in(gradient, view);
  const double factor = weight();
  if (!is_in_place || factor != 1.0) write_gradient(view, gradient, factor);
  if (is_in_place) return;
  // Autograd may have computed the gradient on another stream.
  device::hold_for_current_stream(gradient);
  gradient = view;
}

// If no rank has used the parameter, its gradient must keep its bits. It is copied here, because
// averaging equal values may round.
void ReplicatedGradients::place_unused(size_t parameter) {
  const at::Tensor& gradient = parameters_[parameter].tensor.grad();
  if (gradient.defined()) {
    untouched_.resize(parameters_.size());
    untouched_[parameter] = gradient.detach().clone();
  }
  place(parameter);
}

void ReplicatedGradients::abort_after(const std::exception_ptr& failure) const {
  std::string what = "an exception that is no std::exception";
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    what = error.what();
  } catch (...) {  // has no text
  }
  group_.process_group().abort(format("the communication hook {} has thrown on {}: {}", hook_name_,
                                      group_.rank_text(), what));
}

std::function<void()> ReplicatedGradients::start_hook(size_t bucket) {
  GradBucket given{.index = bucket,
                   .is_last = bucket + 1 == num_buckets(),
                   .buffer = lent(flat(bucket)),
                   .gradients = {},
                   .parameters = {},
                   .weight = weight()};
  for (const int64_t parameter : layout().buckets[bucket].parameters) {
    const auto index = static_cast<size_t>(parameter);
    given.gradients.push_back(buffers_.views[index]);
    given.parameters.push_back(parameters_[index].tensor);
  }
  const auto guarded = [this](const auto& call) {
    const at::NoGradGuard no_grad;
    try {
      return call();
    } catch (...) {
      abort_after(std::current_exception());
      throw;
    }
  };
  FinishReduction finish = guarded([&] { return hook_->start(given, group_.process_group()); });
  return [guarded, finish = std::move(finish)] { guarded([&] { finish(); }); };
}

void ReplicatedGradients::launch_next() {
  const size_t bucket = num_launched_++;
  waits_.push_back(hook_ ? start_hook(bucket)
                         : group_.all_reduce_async(lent(flat(bucket)), combination_.op));
  if (is_trailer_in_bucket() || num_launched_ < num_buckets()) return;
  waits_.push_back(group_.all_reduce_async(buffers_.trailer, combination_.op));
}

void ReplicatedGradients::finish_early() {
  while (!waits_.empty()) {
    const std::function<void()> wait = std::move(waits_.front());
    waits_.erase(waits_.begin());
    wait();
  }
}

// Reduces the last bucket with a blocking call, because this thread has nothing to do meanwhile.
void ReplicatedGradients::reduce_last() {
  if (!is_trailer_in_bucket()) {
    launch_next();
    return finish_early();
  }
  group_.all_reduce(buffers_.flats[num_launched_++], combination_.op);
}

void ReplicatedGradients::settle_unused(size_t parameter, const Usage& usage) {
  const at::NoGradGuard no_grad;
  if (usage.used_by_some) {
    parameters_[parameter].tensor.mutable_grad() = buffers_.views[parameter];
  } else if (parameter < untouched_.size() && untouched_[parameter].defined()) {
    buffers_.views[parameter].copy_(untouched_[parameter]);
  }
}

void ReplicatedGradients::abandon() {
  if (!hook_) {
    while (num_launched_ < num_buckets()) launch_next();
    return;
  }
  // A hook may run further collectives when it finishes, for which the other ranks wait.
  while (num_launched_ < num_early_buckets()) launch_next();
  finish_early();
  if (!is_last_launched()) reduce_last();
}

}  // namespace cadre
