// Trains the network of PyTorch's MNIST example on any number of processes:
//   cadre run --nproc-per-node 2 ./ddp_mnist FOLDER [EPOCHS]
// FOLDER holds MNIST's files (train-images-idx3-ubyte, ...), plain or .gz.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>

struct Net : torch::nn::Module {
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};

  Net() {
    conv1 = register_module("conv1", torch::nn::Conv2d(1, 32, 3));
    conv2 = register_module("conv2", torch::nn::Conv2d(32, 64, 3));
    fc1 = register_module("fc1", torch::nn::Linear(9216, 128));
    fc2 = register_module("fc2", torch::nn::Linear(128, 10));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(torch::relu(conv2(torch::relu(conv1(x)))), 2);
    x = torch::dropout(x, 0.25, is_training()).flatten(1);
    x = torch::dropout(torch::relu(fc1(x)), 0.5, is_training());
    return torch::log_softmax(fc2(x), 1);
  }
};

int main(int argc, char** argv) try {
  if (argc < 2) {
    std::cerr << "usage: ddp_mnist FOLDER [EPOCHS]" << std::endl;
    return 2;
  }
  const int num_epochs = argc > 2 ? std::atoi(argv[2]) : 10;
  if (num_epochs < 1) {
    std::cerr << "ddp_mnist: EPOCHS must be a number from 1, is " << argv[2] << std::endl;
    return 2;
  }
  auto world = cadre::init_process_group();  // a group of one rank if there is no launcher
  torch::manual_seed(world.rank());          // so that dropout differs between ranks
  at::set_num_threads(1);

  cadre::DistributedDataParallel model{std::make_shared<Net>(), world};
  torch::optim::SGD optimizer{model.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9)};
  // 64 is the number of samples of all ranks together in a step; each rank gets its share of them.
  auto loader =
      cadre::make_data_loader(cadre::Mnist{argv[1]}, {.batch_size = 64, .ranks = world, .seed = 0});
  for (int epoch = 0; epoch < num_epochs; ++epoch) {
    for (const auto& [images, labels] : loader.epoch(epoch)) {  // this rank's share of each batch
      optimizer.zero_grad();
      // The ranks' shares of a batch may differ in size or be empty; DDP weights each rank by its
      // number of images.
      auto loss = torch::nll_loss(model(images), labels);
      loss.backward();  // also reduces the gradients; they are complete on return
      optimizer.step();
    }
  }

  // Every rank classifies its share of the test images; the all_reduce adds up the counts.
  model.eval();
  torch::NoGradGuard no_grad;
  auto tests = cadre::make_data_loader(cadre::Mnist{argv[1], cadre::kMnistTest},
                                       {.batch_size = 64, .ranks = world, .shuffle = false});
  // The number of correctly classified images, and of all images.
  auto sums = torch::zeros({2}, torch::kInt64);
  for (const auto& [images, labels] : tests.epoch(0)) {
    if (images.size(0) == 0) continue;
    sums[0] += model->forward(images).argmax(1).eq(labels).sum();
    sums[1] += images.size(0);
  }
  world.all_reduce(sums);
  if (world.rank() == 0) {
    cadre::save(model.module(), "net.safetensors");
    std::cout << sums[0].item<int64_t>() << " of " << sums[1].item<int64_t>() << " images right"
              << std::endl;
  }
  world.close();
} catch (const cadre::Error& error) {
  std::cerr << "ddp_mnist: " << error.what() << std::endl;
  return 1;
}
