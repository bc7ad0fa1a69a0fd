#include "cadre/reduction/data_parallel_core.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/buckets/gradient_storage.h"
#include "cadre/deferred/deferred_init.h"
#include "cadre/reduction/agreement/trailer.h"
#include "cadre/reduction/reducer.h"
#include "cadre/wrap/autograd_hooks.h"
#include "cadre/wrap/located_group.h"
#include "cadre/wrap/parameter_watch.h"
#include "cadre/wrap/replica_check.h"

namespace cadre::reduction {

namespace {

// The parts of a step, as LocatedGroup names them.
constexpr std::string_view kInForward = "its forward {}, which begins with rank 0's buffers";
constexpr std::string_view kInBackward = "the backward() after its forward {}";
constexpr std::string_view kInMean = "mean_over_ranks() after its forward {}";

// The position in the message of a mean. No backward has it in practice, so a mean and a bucket of
// the same size are told apart.
constexpr StepPosition kPlaceOfMean{.num_older = 7, .num_newer = 0, .places = 0xff};

std::string name_of(const torch::nn::Module* module, const DataParallelOptions& options) {
  if (module != nullptr) return module->name();
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: the module is null; make it first, for example with "
                     "std::make_shared<Net>()",
                     options.wrapper));
}

}  // namespace

DataParallelCore::DataParallelCore(const std::shared_ptr<const torch::nn::Module>& module,
                                   const ProcessGroup& group, DataParallelOptions options,
                                   const MakeGradientStorage& make_storage)
    : group_(group, {.wrapper = options.wrapper, .module = name_of(module.get(), options)}),
      wrapper_{.name = options.wrapper,
               .component = options.component,
               .module = module->name(),
               .rank = group.rank()},
      options_(std::move(options)) {
  if (options_.broadcast_parameters) materialize(*module);
  if (group_.world_size() > 1 || !options_.is_idle_alone) start(module, make_storage);
}

void DataParallelCore::start(const std::shared_ptr<const torch::nn::Module>& module,
                             const MakeGradientStorage& make_storage) {
  std::vector<NamedTensor> parameters = distinct_parameters(*module);
  std::erase_if(parameters, [this](const NamedTensor& parameter) {
    return std::ranges::find(options_.ignored, parameter.name) != options_.ignored.end();
  });
  check_not_wrapped(parameters);
  const std::vector<NamedTensor> buffers = distinct_buffers(*module);
  const uint64_t number = wrap::check_replicas_match(wrapper_.name, {parameters, buffers}, group_);
  wrapper_.number = static_cast<uint32_t>(number % kGotOtherBuffers);
  if (options_.broadcast_parameters) wrap::broadcast_tensors(parameters, /*root=*/0, group_);
  wrap::broadcast_tensors(buffers, /*root=*/0, group_);
  if (!buffers.empty()) {
    sent_buffers_.push_back({"", at::empty({1}, at::kLong)});
    sent_buffers_.insert(sent_buffers_.end(), buffers.begin(), buffers.end());
  }
  std::vector<NamedTensor> trained;
  std::ranges::copy_if(parameters, std::back_inserter(trained), [](const NamedTensor& parameter) {
    return parameter.tensor.requires_grad();
  });
  if (trained.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: none of the module's {} parameters requires grad; use the module as it "
                       "is",
                       wrapper_.place(), parameters.size()));
  }
  std::unique_ptr<GradientStorage> storage = make_storage(std::move(trained), group_);
  watch_ =
      std::make_unique<wrap::ParameterWatch>(module);  // a storage may give parameters new memory
  reducer_ = std::make_unique<Reducer>(std::move(storage), group_, wrapper_, options_.weighting);
  group_.enter({kInBackward, num_forwards_});
}

DataParallelCore::~DataParallelCore() = default;

void DataParallelCore::before_forward(bool is_training, std::optional<int64_t> num_rows) {
  if (options_.before_forward) options_.before_forward();
  for (const auto& call : calls_before_forward_) call();
  last_num_samples_ = num_samples_ ? num_samples_ : num_rows;
  is_recorded_ = at::GradMode::is_enabled();
  if (!reducer_ || !is_recorded_) return;
  reducer_->begin_forward(last_num_samples());
  check_unchanged();
  if (num_no_sync_ > 0) return;
  group_.enter({kInForward, ++num_forwards_});
  if (options_.broadcast_buffers && is_training) broadcast_buffers();
  group_.enter({kInBackward, num_forwards_});
}

// If rank 0 has sent the buffers of another wrapper, all ranks throw in the next pass: if this rank
// threw alone, the others would wait for it.
void DataParallelCore::broadcast_buffers() {
  if (sent_buffers_.empty()) return;
  int64_t& sent_number = sent_buffers_[0].tensor.mutable_data_ptr<int64_t>()[0];
  sent_number = wrapper_.number;
  wrap::broadcast_tensors(sent_buffers_, /*root=*/0, group_);
  if (sent_number != wrapper_.number) reducer_->set_got_other_buffers();
}

void DataParallelCore::after_forward(std::span<const at::Tensor> outputs) {
  // The mode at the beginning of the forward: forward() may have changed it since.
  if (!std::exchange(is_recorded_, false)) return;
  num_samples_.reset();  // after the forward, because one that throws may be called again
  if (reducer_) reducer_->watch(outputs);
}

int64_t DataParallelCore::last_num_samples() const {
  if (options_.weighting == GradientWeighting::kEqual) return 1;
  if (last_num_samples_) return *last_num_samples_;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: forward() is given no tensor that the "
                     "wrapper knows, so it cannot count the samples by which ranks are weighted. "
                     "Call set_num_samples(n) before it, or define std::vector<torch::Tensor> "
                     "held_tensors(const YourStruct&) beside the struct that holds them, or set "
                     "weighting = GradientWeighting::kEqual on all ranks",
                     wrapper_.place()));
}

// Two wrappers of one parameter would both move its gradient into a bucket.
void DataParallelCore::check_not_wrapped(std::span<const NamedTensor> parameters) const {
  for (const NamedTensor& parameter : parameters) {
    if (!wrap::AccumulationHooks::has_hook(parameter.tensor)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: \"{}\" is wrapped already, and its "
                       "gradient can be reduced by one wrapper only. Use the first wrapper, or "
                       "destroy it before the module is wrapped again",
                       wrapper_.place(), parameter.name));
  }
}

void DataParallelCore::check_unchanged() const {
  std::optional<std::string> change = watch_->change();
  if (!change) change = reducer_->lost_parameter();
  if (!change) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: since the module was wrapped, {}, so "
                     "gradients would not be reduced rightly. Wrap the module again after the "
                     "change, on all ranks, and give its parameters to a new optimizer",
                     wrapper_.place(), *change));
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

void DataParallelCore::enter_no_sync() {
  ++num_no_sync_;
  if (reducer_) reducer_->set_sync(false);
}

void DataParallelCore::leave_no_sync() {
  --num_no_sync_;
  if (reducer_) reducer_->set_sync(num_no_sync_ == 0);
}

void DataParallelCore::reduce_gradients() {
  if (reducer_) reducer_->reduce_now();
}

double DataParallelCore::mean_over_ranks(double value) {
  if (group_.world_size() == 1) return value;
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
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: the ranks are in "
                       "mean_over_ranks() of different wrappers (this rank in that of the one made "
                       "at #{}), or some in backward(). All ranks call it at the same place, for "
                       "the same wrapper",
                       wrapper_.place_with_module(), wrapper_.number));
  }
  return values[0] / values[1];
}

void DataParallelCore::call_before_forward(std::function<void()> call) {
  calls_before_forward_.push_back(std::move(call));
}

void DataParallelCore::zero_grad(bool set_to_none) {
  if (reducer_) reducer_->zero_grad(set_to_none);
}

std::optional<BucketLayout> DataParallelCore::learned_layout() const {
  return reducer_ ? reducer_->learned_layout() : std::nullopt;
}

}  // namespace cadre::reduction
