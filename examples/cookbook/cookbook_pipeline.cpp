// Pipeline parallelism: the ranks have different layers and compute at the same time, each with
// another microbatch.
#include "cookbook.h"

int main(int argc, char** argv) {
  const auto world = cadre::init_process_group();
  const cadre::DeviceMesh mesh(world, {{"rows", 1}, {"pp", world.world_size()}});
  cookbook::Run run(argc, argv, world, mesh.group("rows"));
  auto decoder = cookbook::make_decoder();
  auto pipeline =
      cadre::pipeline_of(*decoder, mesh["pp"], {.schedule = "1f1b", .num_microbatches = 8});
  decoder = nullptr;  // frees the layers of the other ranks
  torch::optim::AdamW optimizer(pipeline.parameters(), cookbook::adamw());
  run.train([&](const torch::Tensor& tokens, const torch::Tensor& next) {
    optimizer.zero_grad();
    pipeline.step(tokens, next, cookbook::loss_of);
    optimizer.step();
  });
  run.report("pipeline", [&](const torch::Tensor& tokens, const torch::Tensor& next) {
    return pipeline.forward(tokens, next, cookbook::loss_of, {.broadcast_losses = true}).loss;
  });
}
