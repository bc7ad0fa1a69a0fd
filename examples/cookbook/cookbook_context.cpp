// Context parallelism: each rank has a part of the tokens of every row, and the attention of the
// ranks exchanges keys and values.
#include "cookbook.h"

int main(int argc, char** argv) {
  const auto world = cadre::init_process_group();
  const cadre::DeviceMesh mesh(world, {{"rows", 1}, {"cp", world.world_size()}});
  cookbook::Run run(argc, argv, world, mesh.group("rows"));
  auto decoder = cookbook::make_decoder();
  const cadre::ContextParallel context(mesh["cp"], {.num_tokens = cookbook::kSizes.context});
  cadre::set_context_parallel(*decoder, context);
  torch::optim::AdamW optimizer(decoder->parameters(), cookbook::adamw());
  // The embedding takes whole rows, and the logits are those of this rank's tokens.
  const auto loss_of = [&](const torch::Tensor& tokens, const torch::Tensor& next) {
    const auto own = context.shard(next, 1);
    const auto mean = cookbook::loss_of(decoder->forward(tokens), own);
    return context.mean_over_tokens(mean * own.numel(), own.numel());
  };
  run.train([&](const torch::Tensor& tokens, const torch::Tensor& next) {
    optimizer.zero_grad();
    loss_of(tokens, next).backward();
    context.sum_gradients(decoder->parameters());
    optimizer.step();
  });
  run.report("context", loss_of);
}
