#include "cadre/layers/joint_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#include <unordered_set>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/group/differentiable.h"

namespace cadre {
namespace {

std::vector<at::Tensor> distinct_trained(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::vector<at::Tensor> trained;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.requires_grad()) continue;
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) trained.push_back(parameter);
  }
  return trained;
}

}  // namespace

at::Tensor mean_over_tokens(const at::Tensor& sum, int64_t count, const ProcessGroup& group) {
  const at::Tensor total = at::full({}, count, sum.options().dtype(at::kLong));
  group.all_reduce(total);
  return functional::reduce_from_group(sum / total.item<int64_t>(), group);
}

void sum_gradients(const std::vector<at::Tensor>& parameters, const ProcessGroup& group,
                   std::string_view caller) {
  if (group.world_size() == 1) return;
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> trained = distinct_trained(parameters);
  std::vector<at::Tensor> tensors;
  std::vector<int32_t> uses;
  for (const at::Tensor& parameter : trained) {
    const at::Tensor& gradient = parameter.grad();
    uses.push_back(gradient.defined() ? 1 : 0);
    if (gradient.defined() && gradient.layout() != at::kStrided) {
      throw Error(
          ErrorCode::kInvalidArgument,
          format(
              "{} on rank {} of {} of group \"{}\": sum_gradients: the gradient of a parameter of "
              "the sizes {} is not dense; make it dense, for example by an embedding with "
              "sparse(false)",
              caller, group.rank(), group.world_size(), group.name(), list_of(parameter.sizes())));
    }
    tensors.push_back(gradient.defined() ? gradient.contiguous()
                                         : at::zeros_like(parameter, at::MemoryFormat::Contiguous));
  }
  const at::Tensor num_uses = at::tensor(uses, at::kInt);
  tensors.push_back(num_uses);
  group.all_reduce_coalesced(tensors);
  for (size_t i = 0; i < trained.size(); ++i) {
    if (num_uses.const_data_ptr<int32_t>()[i] > 0) trained[i].mutable_grad() = tensors[i];
  }
}

}  // namespace cadre
