#include "cadre/tensor/hooks/named_tensors.h"

#include <torch/nn/module.h>

#include <unordered_set>

namespace cadre {

namespace {

std::vector<NamedTensor> distinct(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::vector<NamedTensor> result;
  for (const auto& item : tensors) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    result.push_back({item.key(), item.value()});
  }
  return result;
}

}  // namespace

std::vector<NamedTensor> distinct_parameters(const torch::nn::Module& module) {
  return distinct(module.named_parameters());
}

std::vector<NamedTensor> distinct_buffers(const torch::nn::Module& module) {
  return distinct(module.named_buffers());
}

int64_t num_elements(const std::vector<at::Tensor>& tensors) {
  int64_t sum = 0;
  for (const at::Tensor& tensor : tensors) sum += tensor.numel();
  return sum;
}

}  // namespace cadre
