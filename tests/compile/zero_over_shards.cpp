// This file must not compile. For each marked line the compiler's errors must contain a sentence
// that says what to use. compile_errors_test.py searches for it.
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
