// This file must not compile. The compiler must report an error for each line marked "refused",
// with a sentence that says which class to use; compile_errors_test.py checks that.
#include <torch/nn/modules/linear.h>

#include "cadre/fsdp.h"
#include "cadre/optim.h"
#include "cadre/zero.h"

void divide(const cadre::ProcessGroup& world) {
  const torch::optim::AdamWOptions options(0.1);
  cadre::FullyShardedDataParallel model{torch::nn::Linear(1, 1), world};
  cadre::ZeroRedundancyOptimizer<cadre::AdamW> a{model, options};  // refused

  cadre::AdamW b(model.parameters(), options);
  b.step();
}
