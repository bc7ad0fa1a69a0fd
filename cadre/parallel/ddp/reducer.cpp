#include "cadre/parallel/ddp/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <numeric>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"

namespace cadre {

namespace {

// Reverse order of registration: a first guess at the order in which gradients become ready.
std::vector<int64_t> reverse_order(size_t num_parameters) {
  std::vector<int64_t> order(num_parameters);
  std::iota(order.rbegin(), order.rend(), 0);
  return order;
}

bool lies_in(const at::Tensor& gradient, const at::Tensor& view) {
  return gradient.const_data_ptr() == view.const_data_ptr() && gradient.strides() == view.strides();
}

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                 std::shared_ptr<ReplicaGroup> group, const DistributedDataParallelOptions& options)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      group_(std::move(group)),
      caps_(options.bucket_caps),
      weighting_(options.weighting),
      layout_is_learned_(options.layout.has_value()),
      is_dirty_(parameters_.size(), false),
      self_(std::make_shared<Reducer*>(this)) {
  const std::vector<ParameterSize> sizes = sizes_of(parameters_);
  if (options.layout) check_layout_fits(*options.layout, sizes).value_or_throw();
  buckets_ = std::make_unique<GradientBuckets>(
      parameters_,
      options.layout.value_or(plan_bucket_layout(sizes, reverse_order(sizes.size()), caps_)),
      *group_);
  hooks_ = std::make_unique<AccumulationHooks>(
      parameters_, [this](size_t parameter) { on_gradient(parameter); });
}

Reducer::~Reducer() = default;

std::optional<BucketLayout> Reducer::learned_layout() const {
  if (!layout_is_learned_) return std::nullopt;
  return buckets_->layout();
}

void Reducer::watch(std::span<const at::Tensor> outputs) {
  ++num_unreduced_forwards_;
  const auto forward = std::make_shared<Forward>();
  for (const at::Tensor& output : outputs) {
    at_start_of_backward(output, [self = std::weak_ptr<Reducer*>(self_), forward] {
      if (const auto reducer = self.lock()) (*reducer)->on_output(forward);
    });
  }
}

void Reducer::on_output(const std::shared_ptr<Forward>& forward) {
  if (!sync_ || !hooks_->current_backward_reaches_a_parameter()) return;
  if (forward->is_reduced) {
    throw Error(ErrorCode::kInvalidArgument,
                format("DistributedDataParallel, rank {}: a second backward() through one forward; "
                       "the gradients of the first were reduced already. Add the losses and call "
                       "backward() once, or hold no_sync() during all but the last",
                       group_->rank()));
  }
  if (!pass_.is_active) begin_backward();
  for (const auto& known : pass_.forwards) {
    if (known == forward) return;
  }
  pass_.forwards.push_back(forward);
}

void Reducer::on_gradient(size_t parameter) {
  is_dirty_[parameter] = true;
  if (!sync_) return;
  if (!pass_.is_active) {
    if (num_unreduced_forwards_ == 0) {
      throw Error(
          ErrorCode::kInvalidArgument,
          format("DistributedDataParallel, rank {}: a gradient of \"{}\" came without a forward "
                 "through the wrapper since the last reduction. Call model(...), not "
                 "model.module()(...); for a second backward through one forward, add the losses "
                 "or hold no_sync() during the first",
                 group_->rank(), names_[parameter]));
    }
    begin_backward();
  }
  if (current_backward_creates_graph()) {
    throw Error(ErrorCode::kInvalidArgument,
                format("DistributedDataParallel, rank {}: backward(create_graph=true) reached "
                       "\"{}\"; a reduced gradient has no graph. Take higher derivatives with "
                       "torch::autograd::grad() and call a plain backward() on the loss",
                       group_->rank(), names_[parameter]));
  }
  if (pass_.fired[parameter]) {
    throw Error(ErrorCode::kInvalidArgument,
                format("DistributedDataParallel, rank {}: the gradient of \"{}\" came twice in one "
                       "backward (a nested backward reaches it again) and may be reduced already. "
                       "Hold no_sync() during this backward and call reduce_gradients() after it",
                       group_->rank(), names_[parameter]));
  }
  pass_.fired[parameter] = true;
  pass_.arrivals.push_back(static_cast<int64_t>(parameter));
  place_gradient(parameter);
  --pass_.num_missing[buckets_->bucket_of(parameter)];
  launch_complete_buckets();
}

void Reducer::set_num_samples(int64_t count) {
  if (sync_) {
    num_samples_ = count;
  } else {
    num_accumulated_samples_ += count;
  }
}

void Reducer::begin_backward() {
  begin_pass();
  pass_.is_backward = true;
  at_end_of_backward([this] { finish_pass(); }, [this] { abandon_pass(); });
}

void Reducer::begin_pass() {
  for (const auto& wait : std::exchange(leftover_waits_, {})) wait();
  pass_ = Pass{};
  pass_.weight = agree_on_weight();
  pass_.fired.assign(parameters_.size(), false);
  for (const BucketLayout::Bucket& bucket : buckets_->layout().buckets) {
    pass_.num_missing.push_back(static_cast<int64_t>(bucket.parameters.size()));
  }
  pass_.is_active = true;
}

double Reducer::agree_on_weight() {
  if (weighting_ == GradientWeighting::kEqual) return 1.0;
  const int64_t own = std::exchange(num_samples_, 0) + std::exchange(num_accumulated_samples_, 0);
  const at::Tensor total = at::zeros({1}, at::kLong);
  *total.mutable_data_ptr<int64_t>() = own;
  group_->all_reduce_async(total, ReduceOp::kSum)();
  const int64_t sum = *total.const_data_ptr<int64_t>();
  if (sum <= 0) {
    throw Error(ErrorCode::kInvalidArgument,
                format("DistributedDataParallel, rank {}: no rank has a sample in this step, so "
                       "there is no mean; end the loop on all ranks",
                       group_->rank()));
  }
  return static_cast<double>(own) / static_cast<double>(sum);
}

// After it the bucket holds this rank's (weighted) share, and the gradient, if there is one, lies
// in the bucket.
void Reducer::place_gradient(size_t parameter) {
  const at::NoGradGuard no_grad;
  const at::Tensor& view = buckets_->view(parameter);
  at::Tensor& gradient = parameters_[parameter].mutable_grad();
  if (!gradient.defined()) {
    view.zero_();
    return;
  }
  if (gradient.layout() != at::kStrided || gradient.scalar_type() != view.scalar_type()) {
    throw Error(ErrorCode::kInvalidArgument,
                format("DistributedDataParallel, rank {}: the gradient of \"{}\" is {}, {}; only "
                       "dense gradients of the parameter's dtype are reduced. For an Embedding, "
                       "set sparse(false)",
                       group_->rank(), names_[parameter],
                       gradient.layout() == at::kStrided ? "dense" : "sparse",
                       c10::toString(gradient.scalar_type())));
  }
  if (pass_.weight == 0.0) {
    view.zero_();  // the mean over no samples may be NaN, which zero times it would keep
  } else if (pass_.weight != 1.0) {
    at::Tensor target = view;
    // A 0-dim double does not promote the result, and a bfloat16 weight would not sum to one.
    at::mul_out(target, gradient, at::scalar_tensor(pass_.weight, at::kDouble));
  } else if (!lies_in(gradient, view)) {
    view.copy_(gradient);
  }
  if (!lies_in(gradient, view)) gradient = view;
}

// The last bucket waits for the end of the backward: until then its trailer is not known.
void Reducer::launch_complete_buckets() {
  while (pass_.num_launched + 1 < buckets_->num_buckets() &&
         pass_.num_missing[pass_.num_launched] == 0) {
    launch_bucket(/*needs_attention=*/false);
  }
}

void Reducer::launch_bucket(bool needs_attention) {
  const size_t bucket = pass_.num_launched++;
  if (pass_.num_launched == buckets_->num_buckets()) {
    const at::NoGradGuard no_grad;
    buckets_->trailer().fill_(needs_attention ? 1 : 0);
  }
  const ReduceOp op = weighting_ == GradientWeighting::kEqual ? ReduceOp::kAvg : ReduceOp::kSum;
  pass_.waits.push_back(group_->all_reduce_async(buckets_->flat(bucket), op));
}

bool Reducer::contributes(size_t parameter) const {
  return pass_.fired[parameter] ||
         (is_dirty_[parameter] && parameters_[parameter].grad().defined());
}

void Reducer::finish_pass() {
  // Whatever is thrown below, the next backward starts afresh; bucket memory that the group still
  // works on is waited for first.
  struct Reset {
    Reducer& reducer;
    ~Reset() {
      reducer.pass_.is_active = false;
      reducer.leftover_waits_ = std::move(reducer.pass_.waits);
    }
  } reset{*this};
  std::vector<at::Tensor> untouched;
  try {
    untouched = launch_rest();
  } catch (...) {
    abandon_pass();
    pass_.waits = std::move(leftover_waits_);
    throw;
  }
  wait_for_buckets();
  if (buckets_->trailer().item<double>() != 0) {
    const at::Tensor counts = attention_counts(/*gave_up=*/false);
    group_->all_reduce_async(counts, ReduceOp::kSum)();
    settle_unused(counts, untouched);
  }
  is_dirty_.assign(parameters_.size(), false);
  for (const auto& forward : pass_.forwards) forward->is_reduced = true;
  num_unreduced_forwards_ -= static_cast<int>(pass_.forwards.size());
  if (pass_.forwards.empty() || num_unreduced_forwards_ < 0) num_unreduced_forwards_ = 0;
  if (pass_.is_backward && !layout_is_learned_) learn_layout();
}

std::vector<at::Tensor> Reducer::launch_rest() {
  bool has_unused = false;
  std::vector<at::Tensor> untouched(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (pass_.fired[i]) continue;
    if (!contributes(i)) {
      has_unused = true;
      // Averaging equal values may round: keep the bits of a gradient that nobody touches.
      if (parameters_[i].grad().defined()) untouched[i] = parameters_[i].grad().detach().clone();
    }
    place_gradient(i);
  }
  while (pass_.num_launched < buckets_->num_buckets()) launch_bucket(has_unused);
  return untouched;
}

void Reducer::wait_for_buckets() {
  while (!pass_.waits.empty()) {
    const std::function<void()> wait = std::move(pass_.waits.front());
    pass_.waits.erase(pass_.waits.begin());
    wait();
  }
}

at::Tensor Reducer::attention_counts(bool gave_up) const {
  const int64_t num_parameters = static_cast<int64_t>(parameters_.size());
  const at::Tensor counts = at::zeros({num_parameters + group_->world_size()}, at::kInt);
  int32_t* values = counts.mutable_data_ptr<int32_t>();
  for (size_t i = 0; i < parameters_.size(); ++i) values[i] = contributes(i) ? 1 : 0;
  if (gave_up) values[num_parameters + group_->rank()] = 1;
  return counts;
}

void Reducer::settle_unused(const at::Tensor& counts, const std::vector<at::Tensor>& untouched) {
  const int32_t* values = counts.const_data_ptr<int32_t>();
  for (int rank = 0; rank < group_->world_size(); ++rank) {
    if (values[parameters_.size() + rank] == 0) continue;
    throw Error(ErrorCode::kAborted,
                format("DistributedDataParallel, rank {}: rank {} left this backward by an "
                       "exception, so its gradients are missing; look at its error. The group is "
                       "well: zero the gradients and go on with the next step on all ranks",
                       group_->rank(), rank));
  }
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (pass_.fired[i]) continue;
    if (values[i] > 0) {
      parameters_[i].mutable_grad() = buckets_->view(i);
    } else if (untouched[i].defined()) {
      buckets_->view(i).copy_(untouched[i]);
    }
  }
}

// The other ranks are in this pass too and wait for this one: it takes part in what remains without
// waiting, and says in the trailer that it gave up. A group that has failed refuses; its error
// comes with the next call.
void Reducer::abandon_pass() noexcept {
  pass_.is_active = false;
  try {
    while (pass_.num_launched < buckets_->num_buckets()) launch_bucket(/*needs_attention=*/true);
    pass_.waits.push_back(
        group_->all_reduce_async(attention_counts(/*gave_up=*/true), ReduceOp::kSum));
  } catch (const std::exception&) {
  }
  leftover_waits_ = std::move(pass_.waits);
}

void Reducer::reduce_now() {
  begin_pass();
  finish_pass();
}

void Reducer::learn_layout() {
  std::vector<int64_t> order = pass_.arrivals;
  for (const BucketLayout::Bucket& bucket : buckets_->layout().buckets) {
    for (const int64_t parameter : bucket.parameters) {
      if (!pass_.fired[parameter]) order.push_back(parameter);
    }
  }
  const at::Tensor agreed = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
  std::copy(order.begin(), order.end(), agreed.mutable_data_ptr<int64_t>());
  group_->broadcast(agreed, /*root=*/0);
  const BucketLayout layout = plan_bucket_layout(
      sizes_of(parameters_),
      std::span<const int64_t>(agreed.const_data_ptr<int64_t>(), order.size()), caps_);
  if (layout != buckets_->layout()) {
    move_gradients_to(std::make_unique<GradientBuckets>(parameters_, layout, *group_));
  }
  layout_is_learned_ = true;
}

void Reducer::move_gradients_to(std::unique_ptr<GradientBuckets> buckets) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].mutable_grad();
    if (!gradient.defined()) continue;
    buckets->view(i).copy_(gradient);
    gradient = buckets->view(i);
  }
  buckets_ = std::move(buckets);
}

}  // namespace cadre
