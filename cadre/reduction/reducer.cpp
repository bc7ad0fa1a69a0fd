#include "cadre/reduction/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/base/log.h"
#include "cadre/reduction/agreement/refusals.h"
#include "cadre/reduction/agreement/trailer.h"

namespace cadre {

namespace {

constexpr int kMaxNamesInLog = 20;

// Reverse order of registration: a first guess at the order in which gradients become ready.
std::vector<int64_t> reverse_order(size_t num_parameters) {
  std::vector<int64_t> order(num_parameters);
  std::iota(order.rbegin(), order.rend(), 0);
  return order;
}

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                 std::shared_ptr<ReplicaGroup> group, Wrapper wrapper,
                 const DataParallelOptions& options)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      group_(std::move(group)),
      wrapper_(std::make_shared<const Wrapper>(std::move(wrapper))),
      caps_(options.bucket_caps),
      weighting_(options.weighting),
      layout_is_learned_(options.layout.has_value()),
      local_(parameters_, ledger_),
      self_(std::make_shared<Reducer*>(this)) {
  const std::vector<ParameterSize> sizes = sizes_of(parameters_);
  if (options.layout) check_layout_fits(*options.layout, sizes).value_or_throw();
  buckets_ = std::make_unique<GradientBuckets>(
      parameters_,
      options.layout.value_or(plan_bucket_layout(sizes, reverse_order(sizes.size()), caps_)),
      kTrailerNumel, *group_);
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
  local_.forget_if_cleared(std::nullopt);
  forward_ = ledger_.enter({.num_samples = num_samples, .is_synchronized = sync_});
}

void Reducer::watch(std::span<const at::Tensor> outputs) {
  ++num_unreduced_forwards_;
  const auto forward = std::exchange(forward_, nullptr);
  ledger_.set_returned(forward->number);
  for (const at::Tensor& output : outputs) {
    const auto node = at_start_of_backward(output, [self = std::weak_ptr<Reducer*>(self_),
                                                    hooks = hooks_, forward, wrapper = wrapper_] {
      const auto reducer = self.lock();
      if (!hooks->current_backward_reaches_a_parameter()) {
        if (reducer && current_backward_creates_graph()) (*reducer)->on_derivative(forward);
        return;
      }
      if (!reducer) refuse_lost_wrapper(*wrapper);
      (*reducer)->on_output(forward);
    });
    if (node) forward->outputs.push_back(*node);
  }
}

void Reducer::on_derivative(const std::shared_ptr<Forward>& forward) {
  ledger_.begin_derivative(forward->number);
  const auto end = [self = std::weak_ptr<Reducer*>(self_)] {
    if (const auto reducer = self.lock()) (*reducer)->ledger_.end_derivatives();
  };
  at_end_of_backward(end, end);
}

void Reducer::on_output(const std::shared_ptr<Forward>& forward) {
  if (!sync_) {
    local_.accumulate(forward.get(), std::nullopt);
    return;
  }
  if (forward->is_reduced) refuse_second_backward(*wrapper_);
  if (!pass_.is_active) begin_backward(forward.get(), std::nullopt);
  if (current_backward_creates_graph()) refuse_create_graph(*wrapper_);
  if (std::ranges::find(pass_.passed, forward) == pass_.passed.end()) join_late(forward);
}

// Its output is in no graph that was known when the pass began: that of a nested backward.
void Reducer::join_late(const std::shared_ptr<Forward>& forward) {
  for (const CarriedForward& late : ledger_.take(forward.get(), {.is_accumulated = false})) {
    pass_.newest_forward = std::max(pass_.newest_forward, late.number);
    if (late.passed) pass_.passed.push_back(late.passed);
    if (weighting_ == GradientWeighting::kEqual) continue;
    if (pass_.weight.needed_of_others != late.num_samples) {
      refuse_unlike_shares(*wrapper_, pass_.samples, late.num_samples);
    }
  }
}

void Reducer::on_gradient(size_t parameter) {
  // Frozen since its forward: the hook runs, but nothing was added.
  if (is_frozen(parameter)) return;
  local_.set_touched(parameter);
  if (!sync_) {
    local_.accumulate(nullptr, parameter);
    return;
  }
  if (!pass_.is_active) begin_backward(nullptr, parameter);
  if (current_backward_creates_graph()) refuse_create_graph(*wrapper_);
  if (pass_.fired[parameter]) refuse_repeated_gradient(*wrapper_, names_[parameter]);
  pass_.fired[parameter] = true;
  pass_.arrivals.push_back(static_cast<int64_t>(parameter));
  place_gradient(parameter);
  --pass_.num_missing[buckets_->bucket_of(parameter)];
  launch_complete_buckets();
}

void Reducer::begin_backward(const Forward* reached, std::optional<size_t> just_touched) {
  settle_last_pass();
  local_.forget_if_cleared(just_touched);
  std::vector<CarriedForward> carried = ledger_.take(reached, {.is_accumulated = false});
  if (carried.empty() && num_unreduced_forwards_ == 0) {
    refuse_direct_call(*wrapper_, names_[just_touched.value_or(0)]);
  }
  begin_pass(std::move(carried));
  pass_.is_backward = true;
  at_end_of_backward([this] { finish_pass(); }, [this] { abandon_pass(); });
  // Here, where no gradient is touched yet. The pass has begun, so that the other ranks hear of it.
  if (current_backward_creates_graph()) refuse_create_graph(*wrapper_);
  if (std::ranges::any_of(pass_.passed, &Forward::is_reduced,
                          [](const auto& passed) -> const Forward& { return *passed; })) {
    refuse_second_backward(*wrapper_);
  }
  if (pass_.weight.unlike) {
    refuse_unlike_shares(*wrapper_, pass_.samples, pass_.samples[*pass_.weight.unlike]);
  }
}

void Reducer::begin_pass(std::vector<CarriedForward> carried) {
  ++num_steps_;
  pass_ = Pass{};
  // Where it carries none, all that wait are older.
  pass_.newest_forward = carried.empty() ? ledger_.last_number() + 1 : carried[0].number;
  if (!carried.empty() && !carried[0].is_certain) {
    std::ranges::copy(ledger_.may_be_carried(), std::back_inserter(carried));
  }
  for (const CarriedForward& forward : carried) {
    pass_.samples.push_back(forward.num_samples);
    if (forward.passed) pass_.passed.push_back(forward.passed);
  }
  const int64_t num_accumulated = local_.take_samples();
  if (weighting_ == GradientWeighting::kSamples) {
    const auto weight = agree_on_weight(
        *group_, {.num_accumulated = num_accumulated, .of_forwards = pass_.samples});
    if (!weight) refuse_no_samples(*wrapper_);
    pass_.weight = *weight;
  } else {
    pass_.weight = equal_weight(*group_);
  }
  pass_.fired.assign(parameters_.size(), false);
  for (const BucketLayout::Bucket& bucket : buckets_->layout().buckets) {
    pass_.num_missing.push_back(static_cast<int64_t>(bucket.parameters.size()));
  }
  pass_.is_active = true;
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
                format("{}: the gradient of \"{}\" is {}, {}; only "
                       "dense gradients of the parameter's dtype are reduced. For an Embedding, "
                       "set sparse(false)",
                       wrapper_->place(), names_[parameter],
                       gradient.layout() == at::kStrided ? "dense" : "sparse",
                       c10::toString(gradient.scalar_type())));
  }
  const double factor = pass_.weight.is_equal_on_all ? 1.0 : pass_.weight.weight;
  if (factor == 0.0) {
    view.zero_();  // the mean over no samples may be NaN, which zero times it would keep
  } else if (factor != 1.0) {
    at::Tensor target = view;
    // A 0-dim double does not promote the result, and a bfloat16 weight would not sum to one.
    at::mul_out(target, gradient, at::scalar_tensor(factor, at::kDouble));
  } else if (!lies_in(gradient, view)) {
    copy_gradient(view, gradient);
  }
  if (!lies_in(gradient, view)) gradient = view;
}

// Equal weights are applied to the sum, once, instead of to each gradient before it.
ReduceOp Reducer::reduce_op() const {
  return pass_.weight.is_equal_on_all ? ReduceOp::kAvg : ReduceOp::kSum;
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

bool Reducer::is_frozen(size_t parameter) const {
  return !parameters_[parameter].requires_grad();
}

bool Reducer::contributes(size_t parameter) const {
  return pass_.fired[parameter] || local_.contribute(parameter);
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
  if (trailer_needs_attention(buckets_->trailer())) {
    const Attention news = attention(/*gave_up=*/false);
    group_->all_reduce(news.counts(), ReduceOp::kSum);
    settle(news, untouched);
  } else {
    forgive_left_behind(pass_.newest_forward);
    ledger_.end_pass(pass_.newest_forward);
  }
  local_.set_reduced();
  for (const auto& forward : pass_.passed) forward->is_reduced = true;
  num_unreduced_forwards_ -= static_cast<int>(pass_.passed.size());
  if (pass_.passed.empty() || num_unreduced_forwards_ < 0) num_unreduced_forwards_ = 0;
  if (pass_.is_backward && !layout_is_learned_) learn_layout();
}

std::vector<at::Tensor> Reducer::launch_all_but_last() {
  bool has_news = false;
  std::vector<at::Tensor> untouched(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (pass_.fired[i]) continue;
    if (is_frozen(i)) has_news = true;
    if (!contributes(i)) {
      has_news = true;
      // Averaging equal values may round: keep the bits of a gradient that nobody touches.
      if (parameters_[i].grad().defined()) untouched[i] = parameters_[i].grad().detach().clone();
    }
    place_gradient(i);
  }
  write_trailer(buckets_->trailer(), trailer_word(has_news));
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

uint32_t Reducer::wrapper_number() const {
  return wrapper_->number | (got_other_buffers_ ? kGotOtherBuffers : 0);
}

TrailerWord Reducer::trailer_word(bool has_news) const {
  return {.wrapper = wrapper_number(),
          .position = ledger_.position(pass_.newest_forward),
          .has_news = has_news};
}

Attention Reducer::attention(bool gave_up) const {
  Attention attention(parameters_.size(), wrapper_, group_->world_size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (contributes(i)) attention.set_used(i);
    if (is_frozen(i)) attention.set_frozen(i);
  }
  if (gave_up) attention.set_gave_up();
  attention.set_position(ledger_.position(pass_.newest_forward));
  attention.set_wrapper(wrapper_number());
  return attention;
}

void Reducer::settle(const Attention& attention, const std::vector<at::Tensor>& untouched) {
  check_ranks_are_in_one_step(attention);
  forgive_left_behind(pass_.newest_forward);
  ledger_.end_pass(pass_.newest_forward);
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

// What is left of the last pass, if this rank left it by an exception: it heard nothing of the
// others until now.
void Reducer::settle_last_pass() {
  for (const auto& wait : std::exchange(leftover_waits_, {})) wait();
  if (apart_) apart_->check_ranks_are_in_one_step(num_steps_);
  if (!abandoned_) return;
  check_ranks_are_in_one_step(*std::exchange(abandoned_, std::nullopt));
  forgive_left_behind(newest_abandoned_forward_);
}

// Once they are apart, equal numbers of a later pass would prove nothing: it stays an error.
void Reducer::check_ranks_are_in_one_step(const Attention& attention) {
  if (!attention.ranks_are_in_one_step()) apart_ = attention;
  attention.check_ranks_are_in_one_step(num_steps_);
}

void Reducer::forgive_left_behind(int64_t newest_forward) {
  const int32_t num_left_behind = ledger_.position(newest_forward).num_older;
  if (num_left_behind > 0) log_left_behind_once(num_left_behind);
  num_steps_ += num_left_behind;
  ledger_.forgive_before(newest_forward);
}

// The ranks agree on how many, which does not prove that they mean the same ones.
void Reducer::log_left_behind_once(int32_t count) {
  if (std::exchange(left_behind_are_logged_, true) || group_->rank() != 0) return;
  group_->log_sink().write(
      LogLevel::kWarning, wrapper_->component,
      format("forwards were left behind without backward on all ranks count={} step={} "
             "module=\"{}\" effect=\"if the ranks left out different steps, each later step "
             "averages different batches; run a forward that is not trained under "
             "torch::NoGradGuard, and leave out the same steps on all ranks\"",
             count, num_steps_, wrapper_->module));
}

// The ranks where it is trained would step, the others not. All ranks see the same counts, so all
// ask who is who, and all throw.
void Reducer::check_frozen_on_all_or_none(const Attention& attention) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (attention.num_frozen(i) == 0 || attention.num_frozen(i) == group_->world_size()) continue;
    const at::Tensor flags = gather_flags({static_cast<uint8_t>(is_frozen(i) ? 1 : 0)});
    throw Error(
        ErrorCode::kInvalidArgument,
        format("{}: \"{}\" is frozen on {} but trained on {}, so the models would drift apart. Set "
               "requires_grad alike on all ranks, zero the gradients and go on",
               wrapper_->place(), names_[i], ranks_text(flags, 0, 1), ranks_text(flags, 0, 0)));
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
      LogLevel::kWarning, wrapper_->component,
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
    if (pass_.num_launched < buckets_->num_buckets()) {
      write_trailer(buckets_->trailer(), trailer_word(/*has_news=*/true));
    }
    while (pass_.num_launched < buckets_->num_buckets()) launch_bucket();
    const Attention news = attention(/*gave_up=*/true);
    pass_.waits.push_back(group_->all_reduce_async(news.counts(), ReduceOp::kSum));
    ledger_.end_pass(pass_.newest_forward);  // for the others it has ended, too
    abandoned_ = news;
    newest_abandoned_forward_ = pass_.newest_forward;
  } catch (const std::exception&) {
  }
  leftover_waits_ = std::move(pass_.waits);
}

void Reducer::reduce_now() {
  settle_last_pass();
  local_.forget_if_cleared(std::nullopt);
  begin_pass({});
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
    move_gradients_to(
        std::make_unique<GradientBuckets>(parameters_, layout, kTrailerNumel, *group_));
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
