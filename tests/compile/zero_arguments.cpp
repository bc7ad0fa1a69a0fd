// This file must not compile. The compiler must report an error for each line marked "refused",
// with a sentence that says which optimizer to use; compile_errors_test.py checks that.
#include <torch/nn/modules/linear.h>
#include <torch/optim/lbfgs.h>

#include "cadre/optim.h"
#include "cadre/zero.h"

void divide(const cadre::ProcessGroup& world) {
  torch::nn::Linear net(1, 1);
  const auto parameters = net->named_parameters();
  cadre::ZeroRedundancyOptimizer<torch::optim::LBFGS> a{parameters, world, 0.1};  // refused

  cadre::ZeroRedundancyOptimizer<cadre::SGD> b{parameters, world, torch::optim::SGDOptions(0.1)};
  b.step();
}
