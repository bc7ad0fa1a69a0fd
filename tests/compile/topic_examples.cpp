// Runs the examples of the topic headers: topic_examples [TOPIC]
//
// The ranks of `cadre run` run all examples of topic_examples.inc, which topic_examples.py writes,
// in one world. With a TOPIC they run only that example, which makes the world itself.
#include <cadre/cadre.h>
#include <cadre/core.h>
#include <torch/torch.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using torch::Tensor;

struct Net : torch::nn::Module {
  Tensor forward(const Tensor& x) { return torch::tanh(linear(x)); }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(4, 4));
};

// Means over the rows, as cadre::verify_strategies() requires.
Tensor loss_of(const Tensor& output) {
  return output.square().mean();
}
Tensor loss_of(const Tensor& output, const Tensor& rows) {
  return loss_of(output) + loss_of(rows);
}
Tensor load_batch() {
  return torch::linspace(-1, 1, 64).view({16, 4});
}

// What the examples use and do not declare.
struct Values {
  Tensor x = load_batch();
  Tensor y = torch::zeros({16, 4});
  Tensor rows = torch::ones({16, 4});
  std::vector<Tensor> parts = {torch::ones({3, 4}), torch::ones({5, 4})};
  int64_t step = 3;
};

struct Context : Values {
  Context(std::string_view topic, cadre::ProcessGroup given) : world(std::move(given)) {
    if (topic == "functional") x.requires_grad_(true);
    if (topic == "symmetric_tensor") x = torch::ones({1024});
  }

  cadre::ProcessGroup world;
  cadre::Communicator& group = world.communicator();
  std::unique_ptr<cadre::os::System> system = cadre::os::make_native_system();
  cadre::Deadline deadline = system->deadline_in(std::chrono::seconds(60));
  std::shared_ptr<Net> net = std::make_shared<Net>();
  cadre::DistributedDataParallel<Net> model{std::make_shared<Net>(), world};
  torch::optim::AdamW optimizer{model->parameters(), torch::optim::AdamWOptions(1e-3)};
};

struct Example {
  std::string_view topic;
  bool makes_world;
  std::function<void(const std::optional<cadre::ProcessGroup>& world)> run;
};

// Defines the examples and the function that lists them: std::vector<Example> examples().
#include "topic_examples.inc"

}  // namespace

int main(int argc, char** argv) {
  const std::string_view only = argc > 1 ? argv[1] : "";
  std::string_view topic = "the world";
  try {
    std::optional<cadre::ProcessGroup> world;
    if (only.empty()) world = cadre::init_process_group();
    for (const Example& example : examples()) {
      if (only.empty() ? example.makes_world : example.topic != only) continue;
      topic = example.topic;
      torch::manual_seed(0);
      example.run(world);
      std::printf("example %s has run\n", std::string(topic).c_str());
    }
    if (world) world->close();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", std::string(topic).c_str(), error.what());
    return 1;
  }
  return 0;
}
