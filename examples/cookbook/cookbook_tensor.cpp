// Tensor parallelism: each rank has a part of the matrices of every layer. The layers know how they
// are divided.
#include "cookbook.h"

int main(int argc, char** argv) {
  const auto world = cadre::init_process_group();
  const cadre::DeviceMesh mesh(world, {{"rows", 1}, {"tp", world.world_size()}});
  cookbook::Run run(argc, argv, world, mesh.group("rows"));
  auto decoder = cookbook::make_decoder();
  cadre::parallelize_module(*decoder, mesh["tp"], cadre::tensor_parallel_plan(*decoder));
  torch::optim::AdamW optimizer(decoder->parameters(), cookbook::adamw());
  // Each rank has the logits of a part of the vocabulary.
  const auto loss_of = [&](const torch::Tensor& logits, const torch::Tensor& next) {
    return cadre::vocab_parallel_cross_entropy(logits, next, mesh.group("tp"),
                                               {.vocabulary = cookbook::kSizes.vocabulary});
  };
  run.train([&](const torch::Tensor& tokens, const torch::Tensor& next) {
    optimizer.zero_grad();
    loss_of(decoder->forward(tokens), next).backward();
    optimizer.step();
  });
  run.report("tensor", [&](const torch::Tensor& tokens, const torch::Tensor& next) {
    return loss_of(decoder->forward(tokens), next);
  });
}
