// ddp_toy as a run that may be interrupted at any time. If it is started again, it resumes from the
// latest snapshot in FOLDER and ends with the same weights.
//   cadre run --nproc-per-node 2 ./ddp_toy_resume FOLDER [STEPS]
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <string>

// Adds the name of the file to torch's error, and drops its stack trace.
static void load_optimizer(torch::optim::Adam& optimizer, const std::string& path) try {
  torch::load(optimizer, path);
} catch (const c10::Error& error) {
  throw cadre::Error(cadre::ErrorCode::kCorruption, path + ": " + error.what_without_backtrace());
}

int main(int argc, char** argv) try {
  const int64_t num_steps = argc > 2 ? std::atoi(argv[2]) : 300;
  if (num_steps < 1) {
    std::cerr << "ddp_toy_resume: STEPS must be a number from 1, is " << argv[2] << std::endl;
    return 2;
  }
  auto world = cadre::init_process_group();
  // The seed of the initial weights, so that every run ends with the same weights.
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(1, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  torch::optim::Adam optimizer{net->parameters(), /*lr=*/0.01};
  cadre::SnapshotFolder snapshots{argc > 1 ? argv[1] : "ddp_toy"};
  const int64_t first = snapshots.latest_step().value_or(0);
  if (first > 0) {
    cadre::load(*net, snapshots.path_of(first) + "/net.safetensors");
    load_optimizer(optimizer, snapshots.path_of(first) + "/adam.pt");
  }
  cadre::DistributedDataParallel model{net, world};
  for (int64_t step = first; step < num_steps; ++step) {
    // Draws the same samples for this step after a restart.
    torch::manual_seed(step * world.world_size() + world.rank());
    auto x = torch::rand({64, 1}) * 6.2832f;
    optimizer.zero_grad();
    torch::mse_loss(model(x), x.sin()).backward();
    optimizer.step();
    if (world.rank() != 0 || (step + 1) % 50 != 0) continue;
    // The folder is renamed when this function has filled it.
    const auto write = [&](const std::string& folder) {
      cadre::save(net, folder + "/net.safetensors");
      torch::save(optimizer, folder + "/adam.pt");
    };
    snapshots.save(step + 1, write);
  }
  std::cout.precision(17);
  std::cout << "rank " << world.rank() << " of " << world.world_size() << ": from step " << first
            << ", weights " << model->parameters()[0].abs().sum().item<double>() << std::endl;
  world.close();
} catch (const cadre::Error& error) {
  std::cerr << "ddp_toy_resume: " << error.what() << std::endl;
  return 1;
}
