#include "cadre/parallel/reduction/reducer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/base/log.h"
#include "cadre/parallel/reduction/agreement/exchanges.h"
#include "cadre/parallel/reduction/agreement/refusals.h"
#include "cadre/parallel/reduction/agreement/trailer.h"
#include "cadre/tensor/group/backward/backward_collectives.h"
#include "cadre/tensor/hooks/shard_mark.h"

namespace cadre::reduction {

namespace {

constexpr int kMaxNamesInLog = 20;

std::vector<at::Tensor> tensors_of(std::span<const NamedTensor> parameters) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& parameter : parameters) tensors.push_back(parameter.tensor);
  return tensors;
}

}  // namespace

Reducer::Reducer(std::unique_ptr<GradientStorage> storage, wrap::LocatedGroup group,
                 Wrapper wrapper, GradientWeighting weighting, ReplicaWatch& replicas)
    : storage_(std::move(storage)),
      parameters_(tensors_of(storage_->parameters())),
      group_(std::move(group)),
      wrapper_(std::make_shared<const Wrapper>(std::move(wrapper))),
      weighting_(weighting),
      replicas_(replicas),
      local_(parameters_, ledger_, [this] { replicas_.set_has_local_gradients(); }),
      self_(std::make_shared<Reducer*>(this)) {
  for (const NamedTensor& parameter : storage_->parameters()) names_.push_back(parameter.name);
  hooks_ = std::make_shared<wrap::AccumulationHooks>(
      parameters_, [this](size_t parameter) { on_gradient(parameter); });
}

Reducer::~Reducer() {
  hooks_->remove();
}

std::optional<BucketLayout> Reducer::learned_layout() const {
  if (!storage_->is_learned()) return std::nullopt;
  return storage_->layout();
}

std::optional<std::string> Reducer::lost_parameter() const {
  const std::optional<size_t> lost = hooks_->first_lost();
  if (!lost) return std::nullopt;
  return format(
      "\"{}\" was moved to another dtype or device and back, or loaded by torch::load(), which "
      "replaces its autograd metadata and so removes its hook (cadre::load() and copy_() do not)",
      names_[*lost]);
}

void Reducer::begin_forward(int64_t num_samples) {
  storage_->forget_cleared(std::nullopt);
  local_.forget_if_cleared(std::nullopt);
  log_left_behind_once();
  forward_ = ledger_.enter({.num_samples = num_samples, .is_synchronized = sync_});
}

void Reducer::watch(std::span<const at::Tensor> outputs) {
  ++num_unreduced_forwards_;
  const auto forward = std::exchange(forward_, nullptr);
  ledger_.set_returned(forward->number);
  for (const at::Tensor& output : outputs) {
    const auto node = wrap::at_start_of_backward(
        output,
        [self = std::weak_ptr<Reducer*>(self_), hooks = hooks_, forward, wrapper = wrapper_] {
          const auto reducer = self.lock();
          if (!hooks->current_backward_reaches_a_parameter()) {
            if (reducer && wrap::current_backward_creates_graph()) {
              (*reducer)->on_derivative(forward);
            } else if (reducer) {
              (*reducer)->ledger_.set_passed(forward->number);
            }
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
  wrap::at_end_of_backward(end, end);
}

void Reducer::on_output(const std::shared_ptr<Forward>& forward) {
  if (!sync_) {
    storage_->forget_cleared(std::nullopt);
    local_.accumulate(forward.get(), std::nullopt);
    return;
  }
  if (forward->is_reduced) refuse_second_backward(*wrapper_);
  if (!pass_.is_active) begin_backward(forward.get(), std::nullopt);
  if (wrap::current_backward_creates_graph()) refuse_create_graph(*wrapper_);
  if (std::ranges::find(pass_.passed, forward) == pass_.passed.end()) join_late(forward);
}

// Adds a forward whose output is only in the graph of a nested backward. When the pass began, it
// was not yet known that this forward belongs to it.
void Reducer::join_late(const std::shared_ptr<Forward>& forward) {
  for (const CarriedForward& late : ledger_.take(forward.get(), {.is_accumulated = false})) {
    pass_.newest_forward = std::max(pass_.newest_forward, late.number);
    if (late.passed) pass_.passed.push_back(late.passed);
    if (weighting_ != GradientWeighting::kSamples) continue;
    if (pass_.weight.needed_of_others != late.num_samples) {
      refuse_unlike_shares(*wrapper_, pass_.samples, late.num_samples);
    }
  }
}

void Reducer::on_gradient(size_t parameter) {
  // A parameter may have been frozen since its forward. Then the hook runs, but no gradient was
  // added.
  if (is_frozen(parameter)) return;
  local_.set_touched(parameter);
  if (!sync_) {
    storage_->forget_cleared(parameter);
    local_.accumulate(nullptr, parameter);
    storage_->keep_local(parameter);
    return;
  }
  if (!pass_.is_active) begin_backward(nullptr, parameter);
  if (wrap::current_backward_creates_graph()) refuse_create_graph(*wrapper_);
  if (pass_.fired[parameter]) refuse_repeated_gradient(*wrapper_, names_[parameter]);
  pass_.fired[parameter] = true;
  pass_.arrivals.push_back(static_cast<int64_t>(parameter));
  place_gradient(parameter);
  --pass_.num_missing[storage_->bucket_of(parameter)];
  launch_complete_buckets();
}

void Reducer::begin_backward(const Forward* reached, std::optional<size_t> just_touched) {
  settle_last_pass();
  storage_->forget_cleared(just_touched);
  local_.forget_if_cleared(just_touched);
  std::vector<CarriedForward> carried = ledger_.take(reached, {.is_accumulated = false});
  if (carried.empty() && num_unreduced_forwards_ == 0) {
    refuse_direct_call(*wrapper_, names_[just_touched.value_or(0)]);
  }
  begin_pass(std::move(carried));
  pass_.is_backward = true;
  if (weighting_ == GradientWeighting::kSamples) {
    pass_.announced.emplace(static_cast<double>(pass_.num_samples));
  }
  wrap::at_end_of_backward([this] { finish_pass(); }, [this] { abandon_pass(); });
  // Checked before any gradient changes, but after the pass has begun, so that abandon_pass()
  // reports the error to the other ranks.
  if (wrap::current_backward_creates_graph()) refuse_create_graph(*wrapper_);
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
  // If no forward belongs to the pass, all waiting forwards count as older.
  pass_.newest_forward = carried.empty() ? ledger_.last_number() + 1 : carried[0].number;
  if (!carried.empty() && !carried[0].is_certain) {
    std::ranges::copy(ledger_.may_be_carried(), std::back_inserter(carried));
  }
  for (const CarriedForward& forward : carried) {
    pass_.samples.push_back(forward.num_samples);
    if (forward.passed) pass_.passed.push_back(forward.passed);
  }
  pass_.backward = current_backward();
  log_unlike_parts_once(carried);
  const int64_t num_accumulated = local_.take_samples();
  pass_.collectives = local_.take_collectives();
  pass_.num_samples = num_accumulated + (pass_.samples.empty() ? 0 : pass_.samples[0]);
  if (weighting_ == GradientWeighting::kSamples) {
    const auto weight =
        agree_on_weight(group_, {.num_accumulated = num_accumulated, .of_forwards = pass_.samples});
    if (!weight) refuse_no_samples(*wrapper_);
    pass_.weight = *weight;
  } else {
    pass_.weight = equal_weight(group_);
  }
  // If the weights of all ranks are equal, the sum is divided once, which saves scaling each
  // gradient before the reduction.
  const bool is_equal = pass_.weight.is_equal_on_all;
  const bool is_mean = is_equal && weighting_ != GradientWeighting::kSum;
  storage_->begin_pass({.factor = is_equal ? 1.0 : pass_.weight.weight,
                        .op = is_mean ? ReduceOp::kAvg : ReduceOp::kSum});
  pass_.fired.assign(parameters_.size(), false);
  pass_.placed.assign(parameters_.size(), false);
  for (const BucketLayout::Bucket& bucket : storage_->layout().buckets) {
    pass_.num_missing.push_back(static_cast<int64_t>(bucket.parameters.size()));
  }
  pass_.is_active = true;
}

void Reducer::place_gradient(size_t parameter) {
  const at::Tensor& gradient = parameters_[parameter].grad();
  const at::ScalarType dtype = parameters_[parameter].scalar_type();
  if (gradient.defined() &&
      (gradient.layout() != at::kStrided || gradient.scalar_type() != dtype)) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: the gradient of \"{}\" is {}, {}; only dense gradients of the "
                       "parameter's dtype are reduced. For an Embedding, set sparse(false)",
                       wrapper_->place(), names_[parameter],
                       gradient.layout() == at::kStrided ? "dense" : "sparse",
                       c10::toString(gradient.scalar_type())));
  }
  storage_->place(parameter);
  pass_.placed[parameter] = true;
}

void Reducer::launch_complete_buckets() {
  while (storage_->num_launched() < storage_->num_eager_buckets() &&
         pass_.num_missing[storage_->num_launched()] == 0) {
    storage_->launch_next();
  }
}

bool Reducer::is_frozen(size_t parameter) const {
  return !parameters_[parameter].requires_grad();
}

// Returns whether the pass reduces the parameter's gradient. If the program has assigned a gradient
// and the backward has not reached it, the backward does not reduce it; reduce_now() does.
bool Reducer::contributes(size_t parameter) const {
  if (local_.contribute(parameter)) return true;
  return !pass_.is_backward && !is_frozen(parameter) && local_.is_changed(parameter);
}

void Reducer::finish_pass() {
  // If something below throws, the next backward begins a new pass. It first waits for operations
  // that still use the memory of the buckets (settle_last_pass).
  struct Reset {
    Reducer& reducer;
    ~Reset() {
      reducer.pass_.is_active = false;
      reducer.pass_.announced.reset();
    }
  } reset{*this};
  try {
    launch_all_but_last();
  } catch (...) {
    abandon_pass();
    throw;
  }
  storage_->finish_early();
  storage_->reduce_last();
  if (trailer_needs_attention(storage_->trailer())) {
    const Attention news = attention(/*gave_up=*/false);
    group_.all_reduce(news.counts(), ReduceOp::kSum);
    settle(news);
  } else {
    forgive_left_behind(pass_.newest_forward);
    ledger_.end_pass(pass_.newest_forward);
  }
  for (const auto& forward : pass_.passed) forward->is_reduced = true;
  num_unreduced_forwards_ -= static_cast<int>(pass_.passed.size());
  if (pass_.passed.empty() || num_unreduced_forwards_ < 0) num_unreduced_forwards_ = 0;
  if (pass_.is_backward && !storage_->is_learned()) learn_layout();
  storage_->end_pass();
  local_.set_reduced();
  replicas_.end_pass();
}

// The last bucket is issued at the end of the backward, because its trailer is complete only then.
void Reducer::launch_all_but_last() {
  bool has_news = !exchanged().empty();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (pass_.fired[i]) continue;
    if (is_frozen(i)) has_news = true;
    if (contributes(i)) {
      place_gradient(i);
    } else {
      has_news = true;
      storage_->place_unused(i);
    }
  }
  while (storage_->num_launched() < storage_->num_early_buckets()) storage_->launch_next();
  // The suspicion is read only after the launches, because these check whether the program has
  // written to parameters.
  if (replicas_.suspicion() != 0) has_news = true;
  write_trailer(storage_->trailer(), trailer_word(has_news));
}

uint32_t Reducer::wrapper_number() const {
  return wrapper_->number | (got_other_buffers_ ? kGotOtherBuffers : 0);
}

TrailerWord Reducer::trailer_word(bool has_news) const {
  return {.wrapper = wrapper_number(),
          .position = ledger_.position(pass_.newest_forward),
          .has_news = has_news,
          .num_writes = replicas_.num_writes(),
          .samples = replicas_.samples()};
}

Attention Reducer::attention(bool gave_up) const {
  Attention attention(parameters_.size(), wrapper_, group_.world_size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (pass_.placed[i]) attention.set_used(i);
    if (is_frozen(i)) attention.set_frozen(i);
  }
  if (gave_up) attention.set_gave_up();
  attention.set_suspicion(replicas_.suspicion());
  attention.set_num_writes(replicas_.num_writes());
  attention.set_samples(replicas_.samples());
  if (!exchanged().empty()) attention.set_exchanged();
  attention.set_position(ledger_.position(pass_.newest_forward));
  attention.set_wrapper(wrapper_number());
  return attention;
}

void Reducer::settle(const Attention& attention) {
  check_ranks_are_in_one_step(attention);
  forgive_left_behind(pass_.newest_forward);
  ledger_.end_pass(pass_.newest_forward);
  attention.check_no_rank_gave_up();
  if (attention.some_have_exchanged()) {
    check_equal_samples(exchanged(), pass_.num_samples, *wrapper_, group_);
  }
  if (attention.replicas_may_differ()) replicas_.check(attention, *wrapper_, group_);
  check_frozen_on_all_or_none(attention);
  log_unused_once(attention);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (pass_.fired[i]) continue;
    storage_->settle_unused(i, {.used_by_some = attention.num_users(i) > 0});
  }
}

// If this rank left the last pass by an exception, abandon_pass() did not wait for the other ranks.
// This waits for them, and throws if the ranks were in different steps.
void Reducer::settle_last_pass() {
  storage_->settle_abandoned();
  if (const auto wait = std::exchange(wait_for_abandoned_, nullptr)) wait();
  if (apart_) apart_->check_ranks_are_in_one_step(num_steps_);
  if (!abandoned_) return;
  check_ranks_are_in_one_step(*std::exchange(abandoned_, std::nullopt));
  forgive_left_behind(newest_abandoned_forward_);
}

// Once the ranks have been in different steps, every later pass throws, too: even if their step
// numbers are equal again, the steps need not be.
void Reducer::check_ranks_are_in_one_step(const Attention& attention) {
  if (!attention.ranks_are_in_one_step()) apart_ = attention;
  attention.check_ranks_are_in_one_step(num_steps_);
}

// Parts made by expert parallelism (has_joint_loss) do not count, because ranks with other experts
// may leave other parameters unused.
bool Reducer::logs_for_all_ranks() const {
  return group_.rank() == 0 && std::ranges::none_of(parameters_, [](const at::Tensor& parameter) {
           const wrap::ShardMark* const mark = wrap::shard_mark_of(parameter);
           return mark != nullptr && mark->rank != 0 && !mark->has_joint_loss;
         });
}

void Reducer::forgive_left_behind(int64_t newest_forward) {
  const int32_t num_left_behind = ledger_.position(newest_forward).num_older;
  if (!usual_left_behind_) usual_left_behind_ = num_left_behind;
  ledger_.forgive_before(newest_forward,
                         {.step = num_steps_, .is_usual = num_left_behind == *usual_left_behind_});
  num_steps_ += num_left_behind;
  log_left_behind_once();
}

// Logs that forwards were left without a backward. All ranks left out the same number of forwards,
// but perhaps in different steps.
void Reducer::log_left_behind_once() {
  if (left_behind_are_logged_ || !logs_for_all_ranks()) return;
  const ForwardLedger::Lost lost = ledger_.lost();
  if (lost.count == 0) return;
  left_behind_are_logged_ = true;
  group_.log_sink().write(
      LogLevel::kWarning, wrapper_->component,
      format("forwards were left behind without backward on all ranks count={} step={} "
             "module=\"{}\" effect=\"if the ranks left out different steps, each later step "
             "averages different batches; run a forward that is not trained under "
             "torch::NoGradGuard, and leave out the same steps on all ranks\"",
             lost.count, lost.step, wrapper_->module));
}

std::vector<std::vector<int>> Reducer::exchanged() const {
  if (pass_.weight.is_equal_on_all) return {};
  std::vector<std::vector<int>> groups = pass_.collectives;
  if (pass_.is_backward) {
    std::ranges::move(collectives_since(pass_.backward), std::back_inserter(groups));
  }
  return shared_ranks(groups, group_);
}

// Throws if a parameter is frozen on some ranks only: the other ranks would update it. All ranks
// have the same counts, so all of them gather the flags and throw.
void Reducer::check_frozen_on_all_or_none(const Attention& attention) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (attention.num_frozen(i) == 0 || attention.num_frozen(i) == group_.world_size()) continue;
    const at::Tensor flags = gather_flags({static_cast<uint8_t>(is_frozen(i) ? 1 : 0)}, group_);
    throw Error(
        ErrorCode::kInvalidArgument,
        format("{}: \"{}\" is frozen on {} but trained on {}, so the models would drift apart. Set "
               "requires_grad alike on all ranks, zero the gradients and continue",
               wrapper_->place(), names_[i], ranks_text(flags, 0, 1), ranks_text(flags, 0, 0)));
  }
}

void Reducer::log_unused_once(const Attention& attention) {
  if (unused_are_logged_) return;
  std::vector<int64_t> unused;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (attention.num_frozen(i) == 0 && attention.num_users(i) < group_.world_size()) {
      unused.push_back(static_cast<int64_t>(i));
    }
  }
  if (unused.empty()) return;
  unused_are_logged_ = true;
  std::vector<uint8_t> is_used;
  for (const int64_t i : unused) is_used.push_back(pass_.placed[i] ? 1 : 0);
  const at::Tensor flags = gather_flags(is_used, group_);
  if (!logs_for_all_ranks()) return;
  std::string names;
  const int64_t num_named = std::min<int64_t>(kMaxNamesInLog, flags.size(1));
  for (int64_t k = 0; k < num_named; ++k) {
    names += format("{}{} ({})", k == 0 ? "" : "; ", names_[unused[k]], ranks_text(flags, k, 0));
  }
  group_.log_sink().write(
      LogLevel::kWarning, wrapper_->component,
      format("backward left parameters unused count={} names=\"{}{}\" effect=\"a parameter that "
             "no rank used keeps its gradient; if only some ranks used it, the other ranks count "
             "as zeros\"",
             unused.size(), names, flags.size(1) > num_named ? "; ..." : ""));
}

// Logs that the accumulated forwards of this rank have different numbers of samples. The wrapper
// cannot see whether the program weighted their losses; a division by the number of parts, for
// example, gives another gradient than the mean over all samples.
void Reducer::log_unlike_parts_once(std::span<const CarriedForward> carried) {
  std::vector<int64_t> samples = local_.samples();
  if (unlike_parts_are_logged_ || losses_are_weighted_ || samples.empty()) return;
  for (const CarriedForward& forward : carried) {
    if (!forward.is_counted) samples.push_back(forward.num_samples);
  }
  const auto [least, most] = std::ranges::minmax(samples);
  if (least == most) return;
  unlike_parts_are_logged_ = true;
  group_.log_sink().write(
      LogLevel::kWarning, wrapper_->component,
      format("gradients of parts with different numbers of samples were accumulated parts={} "
             "fewest={} most={} module=\"{}\" effect=\"the gradient is that of the mean over all "
             "samples only if each loss was multiplied by the samples of its part divided by the "
             "samples of this rank in the whole step; call model.backward_in_parts(), or weight "
             "the losses so and pass no_sync({{.losses_are_weighted = true}})\"",
             samples.size(), least, most, wrapper_->module));
}

// Called when this rank leaves a pass by an exception while the other ranks wait for it. Issues the
// remaining operations without waiting for them; the trailer says that this rank gave up. In a
// group that has failed these operations throw, and the next call throws the group's error.
void Reducer::abandon_pass() noexcept {
  pass_.is_active = false;
  pass_.announced.reset();
  try {
    // The memory of the trailer must not change once its reduction was issued.
    if (!storage_->is_last_launched()) {
      write_trailer(storage_->trailer(), trailer_word(/*has_news=*/true));
    }
    storage_->abandon();
    const Attention news = attention(/*gave_up=*/true);
    wait_for_abandoned_ = group_.all_reduce_async(news.counts(), ReduceOp::kSum);
    ledger_.end_pass(pass_.newest_forward);  // the pass has ended on the other ranks, too
    abandoned_ = news;
    newest_abandoned_forward_ = pass_.newest_forward;
  } catch (...) {  // the group has failed, and the next call throws its error
  }
}

void Reducer::reduce_now() {
  settle_last_pass();
  storage_->forget_cleared(std::nullopt);
  local_.forget_if_cleared(std::nullopt);
  begin_pass({});
  finish_pass();
}

void Reducer::learn_layout() {
  std::vector<int64_t> order = pass_.arrivals;
  for (const BucketLayout::Bucket& bucket : storage_->layout().buckets) {
    for (const int64_t parameter : bucket.parameters) {
      if (!pass_.fired[parameter]) order.push_back(parameter);
    }
  }
  const at::Tensor agreed = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
  std::copy(order.begin(), order.end(), agreed.mutable_data_ptr<int64_t>());
  group_.broadcast(agreed, /*root=*/0);
  storage_->learn({agreed.const_data_ptr<int64_t>(), order.size()});
}

}  // namespace cadre::reduction
