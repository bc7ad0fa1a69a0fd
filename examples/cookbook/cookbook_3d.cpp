// All three: stages of a pipeline along "pp", copies with different rows along "dp", and parts of
// each matrix along "tp".
#include "cookbook.h"

int main(int argc, char** argv) {
  const auto world = cadre::init_process_group();
  const cadre::DeviceMesh mesh(world, {{"pp", 2}, {"dp", world.world_size() / 4}, {"tp", 2}});
  cookbook::Run run(argc, argv, world, mesh.group("dp"));
  auto decoder = cookbook::make_decoder();
  cadre::parallelize_module(*decoder, mesh["tp"], cadre::tensor_parallel_plan(*decoder));
  auto pipeline = cadre::pipeline_of(
      *decoder, mesh["pp"], {.schedule = "1f1b", .num_microbatches = 4, .replicas = mesh["dp"]});
  decoder = nullptr;  // frees the layers of the other ranks
  torch::optim::AdamW optimizer(pipeline.parameters(), cookbook::adamw());
  const auto loss_of = [&](const torch::Tensor& logits, const torch::Tensor& next) {
    return cadre::vocab_parallel_cross_entropy(logits, next, mesh.group("tp"),
                                               {.vocabulary = cookbook::kSizes.vocabulary});
  };
  run.train([&](const torch::Tensor& tokens, const torch::Tensor& next) {
    optimizer.zero_grad();
    pipeline.step(tokens, next, loss_of);
    optimizer.step();
  });
  run.report("3d", [&](const torch::Tensor& tokens, const torch::Tensor& next) {
    return pipeline.forward(tokens, next, loss_of, {.broadcast_losses = true}).loss;
  });
}
