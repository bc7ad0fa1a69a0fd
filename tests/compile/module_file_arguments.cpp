// This file must not compile. The compiler must report an error for each line marked "refused",
// with a sentence that says which argument to pass; compile_errors_test.py checks that.
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
