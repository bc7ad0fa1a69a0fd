// FSDP: each rank has a shard of every layer, and gathers a layer while it computes with it.
#include "cookbook.h"

int main(int argc, char** argv) {
  const auto world = cadre::init_process_group();
  cookbook::Run run(argc, argv, world, world);
  auto decoder = cookbook::make_decoder();
  cadre::FullyShardedDataParallel model{decoder, world, {.wrap_policy = cadre::wrap_layers()}};
  cadre::ShardedOptimizer<cadre::AdamW> optimizer{model, cookbook::adamw()};
  run.train([&](const torch::Tensor& tokens, const torch::Tensor& next) {
    optimizer.zero_grad();
    cookbook::loss_of(model(tokens), next).backward();
    optimizer.step();
  });
  run.report("fsdp", [&](const torch::Tensor& tokens, const torch::Tensor& next) {
    return cookbook::loss_of(model(tokens), next);
  });
}
