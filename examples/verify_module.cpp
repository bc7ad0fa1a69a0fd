// Verifies that your own module trains on several ranks as in one process, under every strategy.
//   cadre run --nproc-per-node 2 ./verify_module             all within the bounds: exit code 0
//   cadre run --nproc-per-node 2 ./verify_module batch_norm  each rank normalizes by only its own
//                                                            rows, which deviates: exit code 1
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <iostream>
#include <string_view>

using torch::Tensor;
namespace nn = torch::nn;

struct NetImpl : nn::Module {
  explicit NetImpl(bool has_batch_norm) {
    hidden = register_module("hidden", nn::ModuleHolder<cadre::ShardUnit<nn::LinearImpl>>(8, 16));
    if (has_batch_norm) norm = register_module("norm", nn::BatchNorm1d(16));
    out = register_module("out", nn::Linear(16, 2));
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = hidden(x);
    return out(torch::tanh(norm.is_empty() ? h : norm(h)));
  }
  nn::ModuleHolder<cadre::ShardUnit<nn::LinearImpl>> hidden{nullptr};
  nn::BatchNorm1d norm{nullptr};
  nn::Linear out{nullptr};
};
TORCH_MODULE(Net);

int main(int argc, char** argv) {
  auto world = cadre::init_process_group();
  const bool has_batch_norm = argc > 1 && std::string_view(argv[1]) == "batch_norm";

  const auto report = cadre::verify_strategies(
      world,
      /*make_module=*/[&] { return Net(has_batch_norm); },
      /*make_batch=*/
      [](int64_t step) {  // the batch of all ranks together; equal in every call
        const Tensor x = torch::sin(torch::arange(24 * 8) * (0.1 + 0.01 * step)).view({24, 8});
        return std::pair(x, x.narrow(1, 0, 2).square());
      },
      /*loss=*/
      [](auto& model, const std::pair<Tensor, Tensor>& rows) {
        return torch::mse_loss(model(rows.first), rows.second);
      },
      torch::optim::AdamWOptions(1e-3), {.num_steps = 3});

  if (world.rank() == 0) std::cout << report.to_text();
  return report.is_within() ? 0 : 1;
}
