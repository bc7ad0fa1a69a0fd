#include "cadre/parallel/layers/joint_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <string>
#include <unordered_set>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/backward/differentiable.h"

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

void check_dense(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined() || gradient.layout() == at::kStrided) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      format("sum_gradients: the gradient of a parameter of the sizes {} is not dense; make "
             "it dense, for example by an embedding with sparse(false)",
             list_of(parameter.sizes())));
}

// Returns the fields that must be equal on all ranks, because the ranks reduce these gradients
// together in this order.
std::vector<AgreedField> fields_of(const std::vector<at::Tensor>& trained) {
  std::vector<AgreedField> fields{
      {"the number of trained parameters", format("{}", trained.size())}};
  for (size_t i = 0; i < trained.size(); ++i) {
    check_dense(trained[i]);
    fields.push_back(
        {format("trained parameter {}", i),
         format("{} {}", c10::toString(trained[i].scalar_type()), list_of(trained[i].sizes()))});
  }
  return fields;
}

}  // namespace

at::Tensor mean_over_tokens(const at::Tensor& sum, int64_t count, const ProcessGroup& group,
                            const char* caller, const std::optional<Error>& refusal,
                            const at::Tensor& device_count) {
  const auto check = [&] {
    if (refusal) throw *refusal;
    if (sum.defined() && sum.numel() == 1 && sum.is_floating_point() && count >= 0) return;
    throw Error(ErrorCode::kInvalidArgument,
                format("mean_over_tokens: the sum of the losses is {} and the number of tokens {}, "
                       "expected a floating-point number and at least 0",
                       !sum.defined() ? std::string("undefined")
                                      : format("{} {}", c10::toString(sum.scalar_type()),
                                               list_of(sum.sizes())),
                       count));
  };
  // totals[0] is the number of tokens, and totals[1] the number of ranks whose arguments are
  // invalid.
  const at::Tensor totals = at::zeros({2}, at::kLong);
  auto* const own = totals.mutable_data_ptr<int64_t>();
  try {
    check();
    own[0] = count;
  } catch (const Error&) {
    own[1] = 1;
  }
  group.all_reduce(totals);
  const auto* const all = totals.const_data_ptr<int64_t>();
  if (all[1] > 0) check_on_all_ranks(group, caller, check);
  if (!device_count.defined()) return functional::reduce_from_group(sum / all[0], group);
  const at::Tensor total = device_count.clone();
  group.all_reduce(total);
  return functional::reduce_from_group(sum / (total + all[0]), group);
}

void sum_gradients(const std::vector<at::Tensor>& parameters, const ProcessGroup& group,
                   const char* caller) {
  if (group.world_size() == 1) return;
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> trained = distinct_trained(parameters);
  check_equal_on_all_ranks(
      group, caller, [&] { return fields_of(trained); },
      "pass the same parameters in the same order on all ranks");
  std::vector<at::Tensor> tensors;
  std::vector<int32_t> uses;
  for (const at::Tensor& parameter : trained) {
    const at::Tensor& gradient = parameter.grad();
    uses.push_back(gradient.defined() ? 1 : 0);
    tensors.push_back(gradient.defined() ? gradient.contiguous()
                                         : at::zeros_like(parameter, at::MemoryFormat::Contiguous));
  }
  const at::Tensor num_uses = at::tensor(uses, at::kInt);
  if (tensors.empty() || tensors.front().is_cpu()) {
    tensors.push_back(num_uses);
    group.all_reduce_coalesced(tensors);
  } else {
    // The host reads the numbers of uses, so they are a call on the CPU.
    const Work reduction = group.all_reduce_coalesced_async(tensors);
    group.all_reduce(num_uses);
    reduction.wait();
  }
  for (size_t i = 0; i < trained.size(); ++i) {
    if (num_uses.const_data_ptr<int32_t>()[i] > 0) trained[i].mutable_grad() = tensors[i];
  }
}

}  // namespace cadre
