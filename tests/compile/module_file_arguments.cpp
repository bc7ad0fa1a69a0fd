// This file must not compile. For each marked line the compiler's errors must contain a sentence
// that says what to pass. compile_errors_test.py searches for it.
#include <torch/nn/modules/linear.h>

#include <memory>

#include "cadre/ddp.h"
#include "cadre/snapshots.h"

void save_and_load(const cadre::ProcessGroup& world) {
  cadre::DistributedDataParallel model{torch::nn::Linear(1, 1), world};
  cadre::save(model, "x");  // refused
  cadre::load(model, "x");  // refused

  cadre::save(model.module(), "x");
  cadre::load(model.module(), "x");
  cadre::save(torch::nn::Linear(1, 1), "x");
}
