// ZeRO, stage 2: data parallelism in which each rank keeps a part of the gradients and of the
// optimizer's state.
#include "cookbook.h"

int main(int argc, char** argv) {
  const auto world = cadre::init_process_group();
  cookbook::Run run(argc, argv, world, world);
  auto decoder = cookbook::make_decoder();
  cadre::DistributedDataParallel model{
      decoder, world, {.gradients = cadre::GradientPlacement::kSharded}};
  cadre::ZeroRedundancyOptimizer<cadre::AdamW> optimizer{model, cookbook::adamw()};
  run.train([&](const torch::Tensor& tokens, const torch::Tensor& next) {
    optimizer.zero_grad();
    cookbook::loss_of(model(tokens), next).backward();
    optimizer.step();
  });
  run.report("zero2", [&](const torch::Tensor& tokens, const torch::Tensor& next) {
    return cookbook::loss_of(model(tokens), next);
  });
}
