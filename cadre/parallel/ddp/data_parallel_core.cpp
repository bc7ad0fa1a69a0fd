#include "cadre/parallel/ddp/data_parallel_core.h"

#include <ATen/core/grad_mode.h>

#include <unordered_set>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/parallel/ddp/reducer.h"

namespace cadre {

namespace {

std::vector<NamedTensor> without_repeats(std::vector<NamedTensor> tensors) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::erase_if(tensors, [&seen](const NamedTensor& named) {
    return !seen.insert(named.tensor.unsafeGetTensorImpl()).second;
  });
  return tensors;
}

}  // namespace

DataParallelCore::DataParallelCore(std::vector<NamedTensor> parameters,
                                   std::vector<NamedTensor> buffers,
                                   std::shared_ptr<ReplicaGroup> group,
                                   const DistributedDataParallelOptions& options)
    : group_(std::move(group)), options_(options), buffers_(without_repeats(std::move(buffers))) {
  if (group_->world_size() == 1) return;
  parameters = without_repeats(std::move(parameters));
  check_replicas_match(parameters, buffers_, *group_);
  broadcast_tensors(parameters, /*root=*/0, *group_);
  broadcast_tensors(buffers_, /*root=*/0, *group_);
  std::vector<at::Tensor> trained;
  std::vector<std::string> names;
  for (const NamedTensor& parameter : parameters) {
    if (parameter.tensor.requires_grad()) {
      trained.push_back(parameter.tensor);
      names.push_back(parameter.name);
    } else {
      frozen_.push_back(parameter);
    }
  }
  if (trained.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                format("DistributedDataParallel, rank {}: none of the module's {} parameters "
                       "requires grad; use the module as it is",
                       group_->rank(), parameters.size()));
  }
  reducer_ = std::make_unique<Reducer>(std::move(trained), std::move(names), group_, options_);
}

DataParallelCore::~DataParallelCore() = default;

void DataParallelCore::before_forward(bool is_training) {
  const bool has_grad = at::GradMode::is_enabled();
  if (options_.weighting == GradientWeighting::kSamples && has_grad) {
    if (!num_samples_) {
      throw Error(ErrorCode::kInvalidArgument,
                  format("DistributedDataParallel, rank {}: replicas are weighted by samples, but "
                         "this forward has no count; call set_num_samples() before each forward",
                         group_->rank()));
    }
    if (reducer_) reducer_->set_num_samples(*num_samples_);
    num_samples_.reset();
  }
  if (!reducer_ || !has_grad) return;
  check_frozen();
  if (options_.broadcast_buffers && is_training && num_no_sync_ == 0) {
    broadcast_tensors(buffers_, /*root=*/0, *group_);
  }
}

void DataParallelCore::after_forward(std::span<const at::Tensor> outputs) {
  if (reducer_ && at::GradMode::is_enabled()) reducer_->watch(outputs);
}

void DataParallelCore::check_frozen() const {
  for (const NamedTensor& parameter : frozen_) {
    if (!parameter.tensor.requires_grad()) continue;
    throw Error(ErrorCode::kInvalidArgument,
                format("DistributedDataParallel, rank {}: \"{}\" was frozen when it was wrapped "
                       "and requires grad now, so its gradient would not be reduced; wrap the "
                       "module again after the change",
                       group_->rank(), parameter.name));
  }
}

void DataParallelCore::set_num_samples(int64_t count) {
  if (options_.weighting != GradientWeighting::kSamples || count < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                format("DistributedDataParallel, rank {}: set_num_samples({}) needs a count >= 0 "
                       "and the option weighting = GradientWeighting::kSamples on all ranks",
                       group_->rank(), count));
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

std::optional<BucketLayout> DataParallelCore::learned_layout() const {
  return reducer_ ? reducer_->learned_layout() : std::nullopt;
}

}  // namespace cadre
