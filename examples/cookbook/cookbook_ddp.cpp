// Data parallelism: each rank has the whole model and a part of the rows, and the wrapper averages
// the gradients while the backward still computes.
#include "cookbook.h"

int main(int argc, char** argv) {
  const auto world = cadre::init_process_group();
  cookbook::Run run(argc, argv, world, world);
  auto decoder = cookbook::make_decoder();
  cadre::DistributedDataParallel model{decoder, world};
  torch::optim::AdamW optimizer(decoder->parameters(), cookbook::adamw());
  run.train([&](const torch::Tensor& tokens, const torch::Tensor& next) {
    optimizer.zero_grad();
    cookbook::loss_of(model(tokens), next).backward();
    optimizer.step();
  });
  run.report("ddp", [&](const torch::Tensor& tokens, const torch::Tensor& next) {
    return cookbook::loss_of(model(tokens), next);
  });
}
