#include "cadre/parallel/ddp/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/base/log.h"

namespace cadre {

namespace {

constexpr int kMaxNamesInLog = 20;

// Reverse order of registration: a first guess at the order in which gradients become ready.
std::vector<int64_t> reverse_order(size_t num_parameters) {
  std::vector<int64_t> order(num_parameters);
  std::iota(order.rbegin(), order.rend(), 0);
  return order;
}

[[noreturn]] void refuse_lost_wrapper(Rank rank) {
  throw Error(ErrorCode::kInvalidArgument,
              format("DistributedDataParallel, rank {}: backward() through a forward whose wrapper "
                     "is gone, so the gradients would be those of this rank alone. Keep the "
                     "DistributedDataParallel until backward() has returned",
                     rank));
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
  hooks_ = std::make_shared<AccumulationHooks>(
      parameters_, [this](size_t parameter) { on_gradient(parameter); });
}

Reducer::~Reducer() {
  hooks_->remove();
}

std::optional<BucketLayout> Reducer::learned_layout() const {
  if (!layout_is_learned_) return std::nullopt;
  return buckets_->layout();
}

std::optional<std::string> Reducer::lost_parameter() const {
  const std::optional<size_t> lost = hooks_->first_lost();
  if (!lost) return std::nullopt;
  return format("\"{}\" was moved to another dtype or device and back", names_[*lost]);
}

void Reducer::begin_forward(int64_t num_samples) {
  num_samples_.reset();
  if (sync_) {
    if (weighting_ == GradientWeighting::kSamples) num_samples_ = num_samples;
    forward_ = ledger_.enter(num_samples_);
  } else {
    num_accumulated_samples_ += num_samples;
    forward_ = std::make_shared<Forward>();
  }
}

void Reducer::watch(std::span<const at::Tensor> outputs) {
  ++num_unreduced_forwards_;
  const auto forward = std::exchange(forward_, nullptr);
  for (const at::Tensor& output : outputs) {
    at_start_of_backward(output, [self = std::weak_ptr<Reducer*>(self_), hooks = hooks_, forward,
                                  rank = group_->rank()] {
      if (!hooks->current_backward_reaches_a_parameter()) return;
      const auto reducer = self.lock();
      if (!reducer) refuse_lost_wrapper(rank);
      (*reducer)->on_output(forward);
    });
  }
}

void Reducer::on_output(const std::shared_ptr<Forward>& forward) {
  ledger_.take(forward->number);
  if (!sync_) {
    num_accumulated_samples_ += std::exchange(forward->num_samples, std::nullopt).value_or(0);
    return;
  }
  if (forward->is_reduced) {
    throw Error(ErrorCode::kInvalidArgument,
                format("DistributedDataParallel, rank {}: a second backward() through one forward; "
                       "the gradients of the first were reduced already. Add the losses and call "
                       "backward() once, or hold no_sync() during all but the last",
                       group_->rank()));
  }
  if (!pass_.is_active) begin_backward(forward->num_samples);
  pass_.newest_forward = std::max(pass_.newest_forward, forward->number);
  // Here, where no gradient is touched yet. The pass has begun, so that the other ranks hear of it.
  if (current_backward_creates_graph()) refuse_create_graph();
  if (forward->num_samples != pass_.num_samples && pass_.shares_differ) {
    throw Error(
        ErrorCode::kInvalidArgument,
        format("DistributedDataParallel, rank {}: one backward() through forwards of {} "
               "and {} samples, of which this rank has different shares, so one weight "
               "cannot serve both. Give each a backward() of its own, or every rank the "
               "same share of each",
               group_->rank(), pass_.num_samples.value_or(0), forward->num_samples.value_or(0)));
  }
  for (const auto& known : pass_.forwards) {
    if (known == forward) return;
  }
  pass_.forwards.push_back(forward);
}

void Reducer::refuse_create_graph() const {
  throw Error(ErrorCode::kInvalidArgument,
              format("DistributedDataParallel, rank {}: backward(create_graph=true), but a reduced "
                     "gradient has no graph. Take higher derivatives with torch::autograd::grad() "
                     "and call a plain backward() on the loss",
                     group_->rank()));
}

void Reducer::on_gradient(size_t parameter) {
  // Frozen since its forward: the hook runs, but nothing was added.
  if (is_frozen(parameter)) return;
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
    begin_backward(num_samples_);
  }
  if (current_backward_creates_graph()) refuse_create_graph();
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

void Reducer::begin_backward(std::optional<int64_t> num_samples) {
  begin_pass(num_samples);
  pass_.is_backward = true;
  at_end_of_backward([this] { finish_pass(); }, [this] { abandon_pass(); });
}

void Reducer::begin_pass(std::optional<int64_t> num_samples) {
  for (const auto& wait : std::exchange(leftover_waits_, {})) wait();
  settle_abandoned_pass();
  ++num_steps_;
  pass_ = Pass{};
  pass_.num_samples = num_samples;
  agree_on_weight();
  pass_.fired.assign(parameters_.size(), false);
  for (const BucketLayout::Bucket& bucket : buckets_->layout().buckets) {
    pass_.num_missing.push_back(static_cast<int64_t>(bucket.parameters.size()));
  }
  pass_.is_active = true;
}

// Sums the counts over ranks: of this pass, and of all forwards that it may go through. Where this
// rank has the same share of both, the weight also serves a pass through several of them.
void Reducer::agree_on_weight() {
  if (weighting_ == GradientWeighting::kEqual) return;
  const int64_t own = pass_.num_samples.value_or(0) + std::exchange(num_accumulated_samples_, 0);
  const int64_t own_of_all = own + ledger_.num_samples();
  const at::Tensor total = at::empty({2}, at::kLong);
  int64_t* sums = total.mutable_data_ptr<int64_t>();
  sums[0] = own;
  sums[1] = own_of_all;
  group_->all_reduce(total, ReduceOp::kSum);
  if (sums[0] > 0) {
    pass_.weight = static_cast<double>(own) / static_cast<double>(sums[0]);
    pass_.shares_differ = own_of_all * sums[0] != own * sums[1];
  } else if (!pass_.num_samples) {
    pass_.weight = 1.0 / group_->world_size();  // no forward was counted: gradients made by hand
  } else {
    throw Error(ErrorCode::kInvalidArgument,
                format("DistributedDataParallel, rank {}: no rank has a sample in this step, so "
                       "there is no mean; end the loop on all ranks",
                       group_->rank()));
  }
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
    copy_gradient(view, gradient);
  }
  if (!lies_in(gradient, view)) gradient = view;
}

ReduceOp Reducer::reduce_op() const {
  return weighting_ == GradientWeighting::kEqual ? ReduceOp::kAvg : ReduceOp::kSum;
}

// The last bucket waits for the end of the backward: until then its trailer is not known.
void Reducer::launch_complete_buckets() {
  while (pass_.num_launched + 1 < buckets_->num_buckets() &&
         pass_.num_missing[pass_.num_launched] == 0) {
    launch_bucket();
  }
}

void Reducer::launch_bucket() {
  pass_.waits.push_back(
      group_->all_reduce_async(buckets_->flat(pass_.num_launched++), reduce_op()));
}

// By this thread, which has nothing else to do now.
void Reducer::reduce_last_bucket() {
  group_->all_reduce(buckets_->flat(pass_.num_launched++), reduce_op());
}

void Reducer::set_trailer(bool needs_attention) {
  const at::NoGradGuard no_grad;
  buckets_->trailer().fill_(needs_attention ? 1 : 0);
}

bool Reducer::is_frozen(size_t parameter) const {
  return !parameters_[parameter].requires_grad();
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
    untouched = launch_all_but_last();
  } catch (...) {
    abandon_pass();
    pass_.waits = std::move(leftover_waits_);
    throw;
  }
  wait_for_buckets();
  reduce_last_bucket();
  if (buckets_->trailer().item<double>() != 0) {
    const Attention news = attention(/*gave_up=*/false);
    group_->all_reduce(news.counts(), ReduceOp::kSum);
    settle(news, untouched);
  }
  is_dirty_.assign(parameters_.size(), false);
  for (const auto& forward : pass_.forwards) forward->is_reduced = true;
  num_unreduced_forwards_ -= static_cast<int>(pass_.forwards.size());
  if (pass_.forwards.empty() || num_unreduced_forwards_ < 0) num_unreduced_forwards_ = 0;
  if (pass_.is_backward && !layout_is_learned_) learn_layout();
}

std::vector<at::Tensor> Reducer::launch_all_but_last() {
  if (pass_.forwards.empty()) {
    // Not through an output: of the newest forward, or between two of them.
    pass_.newest_forward = ledger_.last_number() + (pass_.is_backward ? 0 : 1);
    ledger_.take(pass_.newest_forward);
  }
  bool needs_attention = ledger_.num_left_behind(pass_.newest_forward, false) > 0;
  std::vector<at::Tensor> untouched(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (pass_.fired[i]) continue;
    if (is_frozen(i)) needs_attention = true;
    if (!contributes(i)) {
      needs_attention = true;
      // Averaging equal values may round: keep the bits of a gradient that nobody touches.
      if (parameters_[i].grad().defined()) untouched[i] = parameters_[i].grad().detach().clone();
    }
    place_gradient(i);
  }
  set_trailer(needs_attention);
  while (pass_.num_launched + 1 < buckets_->num_buckets()) launch_bucket();
  return untouched;
}

void Reducer::wait_for_buckets() {
  while (!pass_.waits.empty()) {
    const std::function<void()> wait = std::move(pass_.waits.front());
    pass_.waits.erase(pass_.waits.begin());
    wait();
  }
}

Attention Reducer::attention(bool gave_up) const {
  Attention attention(parameters_.size(), group_->rank(), group_->world_size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (contributes(i)) attention.set_used(i);
    if (is_frozen(i)) attention.set_frozen(i);
  }
  if (gave_up) attention.set_gave_up();
  // A backward that was given up may not have come to all of its forwards, or to none.
  const int64_t newest =
      pass_.newest_forward > 0 || !gave_up ? pass_.newest_forward : ledger_.last_number() + 1;
  attention.set_num_left_behind(ledger_.num_left_behind(newest, /*dropped_only=*/gave_up));
  return attention;
}

void Reducer::settle(const Attention& attention, const std::vector<at::Tensor>& untouched) {
  attention.check_ranks_are_in_one_step(num_steps_);
  num_steps_ += attention.num_left_behind(0);
  bool all_went_through = true;
  for (int rank = 0; rank < group_->world_size(); ++rank) {
    if (attention.gave_up(rank)) all_went_through = false;
  }
  ledger_.forgive_before(all_went_through ? pass_.newest_forward : ledger_.last_number() + 1);
  attention.check_no_rank_gave_up();
  check_frozen_on_all_or_none(attention);
  log_unused_once(attention);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (pass_.fired[i]) continue;
    if (attention.num_users(i) > 0) {
      parameters_[i].mutable_grad() = buckets_->view(i);
    } else if (untouched[i].defined()) {
      buckets_->view(i).copy_(untouched[i]);
    }
  }
}

// This rank left it by an exception and heard nothing of the others until now.
void Reducer::settle_abandoned_pass() {
  if (!abandoned_) return;
  const Attention attention = *std::exchange(abandoned_, std::nullopt);
  if (!attention.ranks_are_in_one_step()) return;  // the next pass throws on all ranks
  num_steps_ += attention.num_left_behind(0);
  ledger_.forgive_before(last_abandoned_forward_ + 1);
}

// The ranks where it is trained would step, the others not. All ranks see the same counts, so all
// ask who is who, and all throw.
void Reducer::check_frozen_on_all_or_none(const Attention& attention) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (attention.num_frozen(i) == 0 || attention.num_frozen(i) == group_->world_size()) continue;
    const at::Tensor flags = gather_flags({static_cast<uint8_t>(is_frozen(i) ? 1 : 0)});
    throw Error(
        ErrorCode::kInvalidArgument,
        format("DistributedDataParallel, rank {}: \"{}\" is frozen on {} but trained on "
               "{}, so the models would drift apart. Set requires_grad alike on all ranks, "
               "zero the gradients and go on",
               group_->rank(), names_[i], ranks_text(flags, 0, 1), ranks_text(flags, 0, 0)));
  }
}

void Reducer::log_unused_once(const Attention& attention) {
  if (unused_are_logged_) return;
  std::vector<int64_t> unused;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (attention.num_frozen(i) == 0 && attention.num_users(i) < group_->world_size()) {
      unused.push_back(static_cast<int64_t>(i));
    }
  }
  if (unused.empty()) return;
  unused_are_logged_ = true;
  std::vector<uint8_t> is_used;
  for (const int64_t i : unused) is_used.push_back(contributes(i) ? 1 : 0);
  const at::Tensor flags = gather_flags(is_used);
  if (group_->rank() != 0) return;
  std::string names;
  const int64_t num_named = std::min<int64_t>(kMaxNamesInLog, flags.size(1));
  for (int64_t k = 0; k < num_named; ++k) {
    names += format("{}{} ({})", k == 0 ? "" : "; ", names_[unused[k]], ranks_text(flags, k, 0));
  }
  group_->log_sink().write(
      LogLevel::kWarning, "ddp",
      format("backward left parameters unused count={} names=\"{}{}\" effect=\"a parameter keeps "
             "its gradient where no rank used it; where some did, the others count as zero\"",
             unused.size(), names, flags.size(1) > num_named ? "; ..." : ""));
}

at::Tensor Reducer::gather_flags(const std::vector<uint8_t>& own) {
  const auto num_flags = static_cast<int64_t>(own.size());
  const at::Tensor mine = at::empty({num_flags}, at::kByte);
  std::copy(own.begin(), own.end(), mine.mutable_data_ptr<uint8_t>());
  const at::Tensor all = at::empty({group_->world_size() * num_flags}, at::kByte);
  group_->all_gather(all, mine);
  return all.view({group_->world_size(), num_flags});
}

// The other ranks are in this pass too and wait for this one: it takes part in what remains without
// waiting, and says in the trailer that it gave up. A group that has failed refuses; its error
// comes with the next call.
void Reducer::abandon_pass() noexcept {
  pass_.is_active = false;
  try {
    if (pass_.num_launched < buckets_->num_buckets()) set_trailer(/*needs_attention=*/true);
    while (pass_.num_launched < buckets_->num_buckets()) launch_bucket();
    const Attention news = attention(/*gave_up=*/true);
    pass_.waits.push_back(group_->all_reduce_async(news.counts(), ReduceOp::kSum));
    abandoned_ = news;
    last_abandoned_forward_ = ledger_.last_number();
  } catch (const std::exception&) {
  }
  leftover_waits_ = std::move(pass_.waits);
}

void Reducer::reduce_now() {
  begin_pass(std::nullopt);
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
