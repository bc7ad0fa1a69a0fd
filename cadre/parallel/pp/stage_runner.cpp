#include "cadre/parallel/pp/stage_runner.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/pp/pipeline_agreement.h"
#include "cadre/parallel/pp/values/stage_values.h"
#include "cadre/tensor/group/group_work.h"
#include "cadre/tensor/hooks/replica_check.h"

namespace cadre::parallel {

void check_dense_gradient(const NamedTensor& parameter) {
  const at::Tensor& gradient = parameter.tensor.grad();
  if (!gradient.defined() || gradient.layout() == at::kStrided) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("the gradient of \"{}\" is not dense; make it dense, for example by an "
                     "embedding with sparse(false)",
                     parameter.name));
}

std::vector<at::Tensor> StageRunner::forward(int microbatch, const std::vector<at::Tensor>& inputs,
                                             const Roots& roots_of) {
  std::vector<at::Tensor> given;
  for (const at::Tensor& leaf : inputs) given.push_back(forward_input(leaf));
  writes_.begin();
  std::vector<at::Tensor> outputs = stage_.forward(given);
  has_written_ |= !writes_.written().empty();
  const std::vector<at::Tensor> roots = roots_of(outputs);
  if (at::GradMode::is_enabled()) live_.emplace(microbatch, StageGraph(roots, inputs));
  return outputs;
}

std::optional<std::string> StageRunner::written_parameter() const {
  const std::vector<size_t> written = writes_.written();
  if (written.empty()) return std::nullopt;
  return writes_.parameters()[written.front()].name;
}

std::vector<at::Tensor> StageRunner::backward(int microbatch,
                                              const std::vector<at::Tensor>& gradients) {
  auto result = live_.at(microbatch).backward(gradients);
  live_.erase(microbatch);
  return result;
}

std::vector<at::Tensor> StageRunner::input_grad(int microbatch,
                                                const std::vector<at::Tensor>& gradients) {
  return live_.at(microbatch).input_pass(gradients);
}

void StageRunner::weight_grad(int microbatch) {
  live_.at(microbatch).weight_pass();
  live_.erase(microbatch);
}

void StageRunner::set_gradients_aside() {
  aside_.clear();
  for (const NamedTensor& parameter : stage_.parameters()) {
    aside_.push_back(std::exchange(parameter.tensor.mutable_grad(), {}));
  }
}

void StageRunner::reduce_grad(const ProcessGroup& replicas) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors;
  std::vector<int32_t> uses;
  for (const NamedTensor& parameter : reduced_) {
    if (!parameter.tensor.requires_grad()) continue;
    check_dense_gradient(parameter);
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    uses.push_back(gradient.defined() ? 1 : 0);
    gradient = gradient.defined() ? gradient.contiguous()
                                  : at::zeros_like(parameter.tensor, at::MemoryFormat::Contiguous);
    tensors.push_back(gradient);
    reducing_.push_back(parameter.tensor);
  }
  if (stage_.parameters().empty()) return;
  uses.push_back(has_written_ ? 1 : 0);
  num_uses_ = at::tensor(uses, at::kInt);
  if (tensors.empty() || tensors.front().is_cpu()) {
    tensors.push_back(num_uses_);
    reduction_ = replicas.all_reduce_coalesced_async(tensors);
  } else {
    // The host reads the numbers of uses, so they are a call on the CPU.
    reduction_ = all_of(
        {replicas.all_reduce_coalesced_async(tensors), replicas.all_reduce_async(num_uses_)});
  }
}

void StageRunner::finish_reduction() {
  if (!reduction_) return;
  reduction_->wait();
  reduction_.reset();
  for (size_t i = 0; i < reducing_.size(); ++i) {
    if (num_uses_.const_data_ptr<int32_t>()[i] == 0) reducing_[i].mutable_grad().reset();
  }
  reducing_.clear();
}

void StageRunner::check_replicas_equal(const ProcessGroup& replicas) {
  if (!num_uses_.defined()) return;
  const bool has_any_written = num_uses_.const_data_ptr<int32_t>()[num_uses_.numel() - 1] > 0;
  num_uses_.reset();
  has_written_ = false;
  if (!has_any_written) return;
  std::vector<at::Tensor> values;
  for (const NamedTensor& parameter : stage_.parameters()) values.push_back(parameter.tensor);
  const auto unlike = wrap::first_unlike(values, replicas);
  if (!unlike) return;
  throw pipeline_refusal(
      format("a forward() has written to \"{}\" of stage {}, and its values in replica {} are not "
             "those in replica 0, so that the replicas would train apart. Compute it from a "
             "parameter that forward() does not change, or write the same in all replicas",
             stage_.parameters()[unlike->place].name, stage_.stage(), unlike->rank));
}

void StageRunner::add_gradients_set_aside() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < aside_.size(); ++i) {
    if (!aside_[i].defined()) continue;
    at::Tensor& gradient = stage_.parameters()[i].tensor.mutable_grad();
    if (gradient.defined()) aside_[i].add_(gradient);
    gradient = aside_[i];
  }
  aside_.clear();
}

void StageRunner::clear() {
  live_.clear();
  aside_.clear();
  reducing_.clear();
  num_uses_.reset();
  reduction_.reset();
}

}  // namespace cadre::parallel
