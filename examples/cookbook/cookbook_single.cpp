// One process: libtorch alone.
#include "cookbook.h"

int main(int argc, char** argv) {
  const auto world = cadre::init_process_group();
  cookbook::Run run(argc, argv, world, world);
  auto decoder = cookbook::make_decoder();
  torch::optim::AdamW optimizer(decoder->parameters(), cookbook::adamw());
  run.train([&](const torch::Tensor& tokens, const torch::Tensor& next) {
    optimizer.zero_grad();
    cookbook::loss_of(decoder->forward(tokens), next).backward();
    optimizer.step();
  });
  run.report("one process", [&](const torch::Tensor& tokens, const torch::Tensor& next) {
    return cookbook::loss_of(decoder->forward(tokens), next);
  });
}
