#include "cadre/train/verify/trainings.h"

#include "cadre/tensor/group/agreement.h"

namespace cadre::verify {

std::vector<NamedTensor> whole_parameters(const torch::nn::Module& module) {
  return distinct_parameters(module);
}

std::vector<NamedTensor> whole_gradients(const torch::nn::Module& module) {
  std::vector<NamedTensor> gradients = distinct_parameters(module);
  for (NamedTensor& parameter : gradients) parameter.tensor = parameter.tensor.grad();
  return gradients;
}

void prepare_on_all_ranks(const ProcessGroup& world, const std::function<void()>& prepare) {
  check_on_all_ranks(world, "verify_strategies", prepare);
}

double mean_over_rows(double loss, int64_t rows, const ProcessGroup& world) {
  const auto weight = static_cast<double>(rows);
  const at::Tensor sums = at::tensor({rows == 0 ? 0.0 : loss * weight, weight}, at::kDouble);
  world.all_reduce(sums);
  return sums[0].item<double>() / sums[1].item<double>();
}

}  // namespace cadre::verify
