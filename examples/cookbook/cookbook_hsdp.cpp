// HSDP: FSDP among the ranks along "shard", usually those of a host, and data parallelism between
// these groups, along "replicate".
#include "cookbook.h"

int main(int argc, char** argv) {
  const auto world = cadre::init_process_group();
  cookbook::Run run(argc, argv, world, world);
  const cadre::DeviceMesh mesh(world, {{"replicate", 2}, {"shard", world.world_size() / 2}});
  auto decoder = cookbook::make_decoder();
  cadre::FullyShardedDataParallel model{decoder, mesh, {.wrap_policy = cadre::wrap_layers()}};
  cadre::ShardedOptimizer<cadre::AdamW> optimizer{model, cookbook::adamw()};
  run.train([&](const torch::Tensor& tokens, const torch::Tensor& next) {
    optimizer.zero_grad();
    cookbook::loss_of(model(tokens), next).backward();
    optimizer.step();
  });
  run.report("hsdp", [&](const torch::Tensor& tokens, const torch::Tensor& next) {
    return cookbook::loss_of(model(tokens), next);
  });
}
