#include "cadre/parallel/reduction/data_parallel_core.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/buckets/gradient_storage.h"
#include "cadre/parallel/deferred/deferred_init.h"
#include "cadre/parallel/reduction/agreement/refusals.h"
#include "cadre/parallel/reduction/agreement/replica_watch.h"
#include "cadre/parallel/reduction/agreement/trailer.h"
#include "cadre/parallel/reduction/buffer_broadcast.h"
#include "cadre/parallel/reduction/reducer.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/backward/backward_weight.h"
#include "cadre/tensor/hooks/autograd_hooks.h"
#include "cadre/tensor/hooks/device_check.h"
#include "cadre/tensor/hooks/located_group.h"
#include "cadre/tensor/hooks/parameter_watch.h"
#include "cadre/tensor/hooks/replica_check.h"
#include "cadre/tensor/hooks/shard_mark.h"
#include "cadre/tensor/hooks/tensor_version.h"

namespace cadre::reduction {

namespace {

// These texts say in an error in which part of a step a rank was (LocatedGroup::Place). {} is the
// number of the forward.
constexpr std::string_view kInForward = "its forward {}, which begins with rank 0's buffers";
constexpr std::string_view kInBackward = "the backward() after its forward {}";
constexpr std::string_view kInMean = "mean_over_ranks() after its forward {}";

// The position that the message of mean_over_ranks() has in place of a forward's position. In
// practice no backward has this position, so the message is never mistaken for a bucket of the same
// size.
constexpr StepPosition kPlaceOfMean{.num_older = 7, .num_newer = 0, .places = 0xff};

std::string name_of(const torch::nn::Module* module) {
  return module == nullptr ? "null" : module->name();
}

// Returns a number that is equal on all ranks and differs between the wrappers of a group: the
// number of collectives that the group has run so far. The ranks compare this number.
uint32_t number_of(const ProcessGroup& group) {
  return static_cast<uint32_t>(group.communicator().num_collectives() % kGotOtherBuffers);
}

[[noreturn]] void refuse_wrapping(const Wrapper& wrapper, const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, format("{}: {}", wrapper.name, problem));
}

}  // namespace

void refuse_moved_from() {
  throw Error(ErrorCode::kInvalidArgument,
              "a wrapper of a module was used after the program had moved from it; use the object "
              "that it was moved to");
}

DataParallelCore::DataParallelCore(const std::shared_ptr<const torch::nn::Module>& module,
                                   const ProcessGroup& group, DataParallelOptions options,
                                   const MakeGradientStorage& make_storage)
    : group_(group, {.wrapper = options.wrapper, .module = name_of(module.get())}),
      wrapper_{.name = options.wrapper,
               .component = options.component,
               .module = name_of(module.get()),
               .rank = group.rank(),
               .rank_text = group_.rank_text(),
               .number = number_of(group)},
      options_(std::move(options)) {
  agree(module.get());
  if (group_.world_size() > 1 || !options_.is_idle_alone) start(module, make_storage);
}

// Called before the first collective that changes anything. Deferred parameters are materialized
// inside this check, because that may fail on one rank only, and then all ranks must throw.
void DataParallelCore::agree(const torch::nn::Module* module) const {
  const AgreementSubject subject(wrapper_.name);
  const auto make_fields = [&] {
    wrap::refuse_inference_mode(wrapper_.name);
    if (module == nullptr) {
      refuse_wrapping(wrapper_,
                      "the module is null; make it first, for example with "
                      "std::make_shared<Net>()");
    }
    wrap::refuse_inference_tensors(wrapper_.name, parameters_of(*module));
    if (options_.broadcast_parameters) materialize(*module);
    if (group_.world_size() > 1 || !options_.is_idle_alone) {
      check_parameters(parameters_of(*module));
      check_devices(*module);
    }
    std::vector<AgreedField> fields = {
        {"weighting", std::string(to_string(options_.weighting))},
        {"broadcast_buffers", options_.broadcast_buffers ? "true" : "false"}};
    if (options_.agreed) std::ranges::move(options_.agreed(), std::back_inserter(fields));
    return fields;
  };
  check_equal_on_all_ranks(group_.process_group(), subject, make_fields,
                           "pass the same options on all ranks");
}

std::vector<NamedTensor> DataParallelCore::parameters_of(const torch::nn::Module& module) const {
  std::vector<NamedTensor> parameters = distinct_parameters(module);
  std::erase_if(parameters, [this](const NamedTensor& parameter) {
    return std::ranges::find(options_.ignored, parameter.name) != options_.ignored.end();
  });
  return parameters;
}

// The wrapper sends parameters and buffers from rank 0, so each is where the group works: on the
// CPU or on its device. The gradients are all on one of them.
void DataParallelCore::check_devices(const torch::nn::Module& module) const {
  const std::vector<NamedTensor> parameters = parameters_of(module);
  std::vector<NamedTensor> sent = distinct_buffers(module);
  sent.insert(sent.end(), parameters.begin(), parameters.end());
  if (const auto problem = wrap::beyond_reach(group_.process_group().device(), sent)) {
    refuse_wrapping(wrapper_, *problem);
  }
  std::vector<NamedTensor> trained;
  for (const NamedTensor& parameter : parameters) {
    if (parameter.tensor.requires_grad()) trained.push_back(parameter);
  }
  if (const auto problem = wrap::not_on_one_device(trained)) refuse_wrapping(wrapper_, *problem);
}

void DataParallelCore::check_parameters(std::span<const NamedTensor> parameters) const {
  std::vector<NamedTensor> trained;
  for (const NamedTensor& parameter : parameters) {
    // Two wrappers of one parameter would both move its gradient into a bucket.
    if (wrap::AccumulationHooks::has_hook(parameter.tensor)) {
      refuse_wrapping(wrapper_, format("\"{}\" is wrapped already, and its gradient can be reduced "
                                       "by one wrapper only. Use the first wrapper, or destroy it "
                                       "before the module is wrapped again",
                                       parameter.name));
    }
    if (!parameter.tensor.is_leaf()) {
      refuse_wrapping(wrapper_, format("\"{}\" is computed from other tensors, so no gradient is "
                                       "kept for it. Register a leaf, and compute from it in "
                                       "forward()",
                                       parameter.name));
    }
    const wrap::ShardMark* const mark = wrap::shard_mark_of(parameter.tensor);
    if (mark != nullptr && mark->has_joint_loss &&
        options_.weighting == GradientWeighting::kSamples) {
      refuse_wrapping(wrapper_, format("\"{}\" is {}: its experts compute tokens of several ranks, "
                                       "so a rank's gradients cannot be weighted by the samples of "
                                       "this rank. Set weighting = GradientWeighting::kSum on "
                                       "all ranks, with a loss that is divided by the tokens of "
                                       "all ranks (ExpertParallel::mean_over_tokens)",
                                       parameter.name, mark->owner));
    }
    if (parameter.tensor.requires_grad()) trained.push_back(parameter);
  }
  if (trained.empty() && options_.needs_trained) {
    refuse_wrapping(wrapper_, format("none of the module's {} parameters requires grad; use the "
                                     "module as it is",
                                     parameters.size()));
  }
  (void)sizes_of(trained);  // throws for a dtype that cannot be reduced
}

void DataParallelCore::start(const std::shared_ptr<const torch::nn::Module>& module,
                             const MakeGradientStorage& make_storage) {
  std::vector<NamedTensor> parameters = parameters_of(*module);
  const std::vector<NamedTensor> buffers = distinct_buffers(*module);
  wrap::check_replicas_match(wrapper_.name, {parameters, buffers}, group_);
  if (options_.broadcast_parameters) wrap::broadcast_tensors(parameters, /*root=*/0, group_);
  wrap::broadcast_tensors(buffers, /*root=*/0, group_);
  std::vector<NamedTensor> trained;
  std::ranges::copy_if(parameters, std::back_inserter(trained), [](const NamedTensor& parameter) {
    return parameter.tensor.requires_grad();
  });
  std::unique_ptr<GradientStorage> storage = make_storage(std::move(trained), group_);
  // The watch begins only here, because the storage may have given the parameters new memory
  // before.
  watch_ = std::make_unique<wrap::ParameterWatch>(module);
  buffers_ = std::make_unique<BufferBroadcast>(buffers, group_, wrapper_.number);
  replicas_ = std::make_unique<ReplicaWatch>(std::move(parameters), options_.values,
                                             options_.written_error);
  reducer_ = std::make_unique<Reducer>(std::move(storage), group_, wrapper_, options_.weighting,
                                       *replicas_);
  group_.enter({kInBackward, num_forwards_});
}

DataParallelCore::~DataParallelCore() = default;

void DataParallelCore::before_forward(bool is_training, std::optional<int64_t> num_rows) {
  if (options_.before_forward) options_.before_forward();
  for (const auto& call : calls_before_forward_) call();
  last_num_samples_ = num_samples_ ? num_samples_ : num_rows;
  has_forward_ = true;
  is_recorded_ = at::GradMode::is_enabled();
  if (!reducer_) return;
  if (is_recorded_) {
    reducer_->begin_forward(last_num_samples());
    check_unchanged();
    if (num_no_sync_ == 0) {
      group_.enter({kInForward, ++num_forwards_});
      if (options_.broadcast_buffers && is_training) broadcast_buffers();
      group_.enter({kInBackward, num_forwards_});
    }
  }
  if (is_recorded_) replicas_->take_samples();
  replicas_->begin_forward();
}

// If rank 0 has sent the buffers of another wrapper, this rank only records that, and all ranks
// throw in the next pass. If this rank threw here, the others would wait for it.
void DataParallelCore::broadcast_buffers() {
  if (!buffers_->run()) reducer_->set_got_other_buffers();
}

void DataParallelCore::after_forward(std::span<const at::Tensor> outputs) {
  if (replicas_) replicas_->end_forward();
  // The grad mode was recorded when the forward began, because forward() may have changed it since.
  if (!std::exchange(is_recorded_, false)) return;
  // num_samples_ is reset only when a forward has returned, because the program may repeat a
  // forward that has thrown.
  num_samples_.reset();
  watch_backwards(outputs);
  if (reducer_) reducer_->watch(outputs);
}

void DataParallelCore::watch_backwards(std::span<const at::Tensor> outputs) const {
  if (calls_before_backward_->empty()) return;
  const std::weak_ptr<const std::vector<std::function<void()>>> weak = calls_before_backward_;
  for (const at::Tensor& output : outputs) {
    wrap::at_start_of_backward(output, [weak] {
      const auto calls = weak.lock();
      if (!calls) return;
      for (const auto& call : *calls) call();
    });
  }
}

int64_t DataParallelCore::last_num_samples() const {
  if (options_.weighting != GradientWeighting::kSamples) return 1;
  if (last_num_samples_) return *last_num_samples_;
  throw Error(
      ErrorCode::kInvalidArgument,
      format("{}: forward() is given no tensor that the wrapper can find, so it cannot count the "
             "samples by which ranks are weighted. Call set_num_samples(n) before it, or define "
             "std::vector<torch::Tensor> held_tensors(const YourStruct&) beside the struct that "
             "holds them, or set weighting = GradientWeighting::kEqual on all ranks",
             wrapper_.place()));
}

void DataParallelCore::check_unchanged() const {
  std::optional<std::string> change = watch_->change();
  if (!change) change = reducer_->lost_parameter();
  if (!change) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      format(
          "{}: since the module was wrapped, {}, so gradients would not be reduced correctly. {}",
          wrapper_.place(), *change, options_.change_remedy));
}

void DataParallelCore::set_written(std::string_view parameter) {
  if (replicas_) replicas_->set_written(parameter);
}

void DataParallelCore::set_num_samples(int64_t count) {
  if (options_.weighting != GradientWeighting::kSamples || count < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: set_num_samples({}) needs a count >= 0 "
                       "and the option weighting = GradientWeighting::kSamples on all ranks",
                       wrapper_.place(), count));
  }
  num_samples_ = count;
}

void DataParallelCore::enter_no_sync(bool losses_are_weighted) {
  ++num_no_sync_;
  if (!reducer_) return;
  reducer_->set_sync(false);
  reducer_->set_losses_are_weighted(losses_are_weighted);
}

void DataParallelCore::leave_no_sync() {
  --num_no_sync_;
  if (reducer_) reducer_->set_sync(num_no_sync_ == 0);
}

void DataParallelCore::reduce_gradients() {
  if (reducer_) reducer_->reduce_now();
}

at::Tensor DataParallelCore::backward_in_parts(std::span<const int64_t> num_samples,
                                               const std::function<at::Tensor(size_t)>& loss_of) {
  struct Accumulation {
    DataParallelCore& core;
    explicit Accumulation(DataParallelCore& of) : core(of) {
      core.enter_no_sync(/*losses_are_weighted=*/true);
    }
    ~Accumulation() { core.leave_no_sync(); }
    Accumulation(const Accumulation&) = delete;
    Accumulation& operator=(const Accumulation&) = delete;
  };
  if (num_samples.empty() || std::ranges::min(num_samples) < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: backward_in_parts() needs the number of samples of each part, at least "
                       "one part, and each count >= 0; it was given {}",
                       wrapper_.place(), list_of(num_samples)));
  }
  const int64_t total = std::accumulate(num_samples.begin(), num_samples.end(), int64_t{0});
  const auto weight_of = [&](int64_t count) {
    if (options_.weighting == GradientWeighting::kSum) return 1.0;
    return total == 0 ? 0.0 : static_cast<double>(count) / static_cast<double>(total);
  };
  // The weight of this rank in the last part's reduction, also for nodes of the other parts.
  std::optional<BackwardWeight> announced;
  if (reducer_ && options_.weighting == GradientWeighting::kSamples) {
    announced.emplace(static_cast<double>(total));
  }
  at::Tensor sum;
  for (size_t part = 0; part < num_samples.size(); ++part) {
    std::optional<Accumulation> accumulation;
    if (part + 1 < num_samples.size()) accumulation.emplace(*this);
    if (options_.weighting == GradientWeighting::kSamples) set_num_samples(num_samples[part]);
    const at::Tensor loss = loss_of(part);
    const double weight = weight_of(num_samples[part]);
    const at::Tensor weighted = loss * weight;
    weighted.backward();
    // The mean over no samples may be NaN, so a part without samples is left out of the sum, unless
    // this rank has no samples at all.
    if (weight == 0 && total > 0) continue;
    sum = sum.defined() ? sum + weighted.detach() : weighted.detach();
  }
  last_num_samples_ = total;
  return sum;
}

double DataParallelCore::mean_over_ranks(double value) {
  if (group_.world_size() == 1) {
    if (has_forward_ && options_.weighting == GradientWeighting::kSamples &&
        last_num_samples_ == 0) {
      refuse_no_samples(wrapper_);
    }
    return value;
  }
  const auto weight = static_cast<double>(last_num_samples());
  const at::Tensor sums = at::empty({2 + kTrailerNumel}, at::kDouble);
  const at::Tensor trailer = sums.narrow(0, 2, kTrailerNumel);
  write_trailer(trailer, {.wrapper = wrapper_.number, .position = kPlaceOfMean});
  double* values = sums.mutable_data_ptr<double>();
  values[0] = weight == 0 ? 0 : weight * value;  // the mean over no samples may be NaN
  values[1] = weight;
  group_.enter({kInMean, num_forwards_});
  group_.all_reduce(sums, ReduceOp::kSum);
  group_.enter({kInBackward, num_forwards_});
  if (trailer_needs_attention(trailer)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        format("{}: the ranks are in mean_over_ranks() of different wrappers (on this rank, of the "
               "one that was made when the group had run {} collectives), or some ranks are in "
               "backward(). All ranks call it at the same place, for the same wrapper",
               wrapper_.place_with_module(), wrapper_.number));
  }
  if (values[1] == 0) refuse_no_samples(wrapper_);
  return values[0] / values[1];
}

void DataParallelCore::call_before_forward(std::function<void()> call) {
  calls_before_forward_.push_back(std::move(call));
}

void DataParallelCore::call_before_backward(std::function<void()> call) {
  calls_before_backward_->push_back(std::move(call));
}

void DataParallelCore::zero_grad(bool set_to_none) {
  if (reducer_) reducer_->zero_grad(set_to_none);
}

std::optional<BucketLayout> DataParallelCore::learned_layout() const {
  return reducer_ ? reducer_->learned_layout() : std::nullopt;
}

}  // namespace cadre::reduction
