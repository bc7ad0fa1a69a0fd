// Runs one rank of a pipeline that trains a GPT from given weights on given tokens.
// pipeline_parity_test.py compares the losses with those of PyTorch.
//
//   cadre_pipeline_parity DATA SCHEDULE STAGES_PER_RANK MICROBATCHES OPTIMIZER LOSSES [tied]
//
// DATA is a safetensors file with the parameters of the model by name, and "tokens" of shape
// (steps, rows, context + 1); each step predicts all tokens but the first of each row. OPTIMIZER is
// sgd or adamw. Rank 0 writes the loss of each step to the file LOSSES, one on each line. With
// "tied" the head has the weight of the token embedding.
#include <ATen/CPUGeneratorImpl.h>
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/schedule/generate.h"
#include "cadre/train/checkpoint/safetensors.h"
#include "cadre/train/trainer/models/gpt.h"

namespace cadre::train {
namespace {

using torch::Tensor;

// pipeline_parity_test.py has the same numbers.
constexpr int64_t kVocabulary = 257;
constexpr int64_t kLayers = 6;
// `tied` is false even for a tied head: the head's stage has a copy of the weight, and the pipeline
// ties the two.
const ModelConfig kModel{.layers = kLayers, .heads = 2, .width = 32, .context = 24, .tied = false};

// Makes stage `number`; the blocks are divided equally among the stages.
std::shared_ptr<Gpt> stage_of(const Gpt& whole, int number, int num_stages) {
  return std::make_shared<Gpt>(whole, GptPart{.first_block = kLayers * number / num_stages,
                                              .end_block = kLayers * (number + 1) / num_stages,
                                              .has_embeddings = number == 0,
                                              .has_head = number == num_stages - 1});
}

struct Arguments {
  std::string data, schedule;
  int stages_per_rank, num_microbatches;
  std::string optimizer, losses;
  bool is_tied;
};

std::unique_ptr<torch::optim::Optimizer> make_parity_optimizer(
    const std::string& kind, const std::vector<Tensor>& parameters) {
  if (kind == "sgd") {
    return std::make_unique<torch::optim::SGD>(parameters,
                                               torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  return std::make_unique<torch::optim::AdamW>(
      parameters, torch::optim::AdamWOptions(3e-3).betas({0.9, 0.99}).weight_decay(0.1));
}

void train(const ProcessGroup& world, const Arguments& arguments) {
  const SafetensorsFile data = SafetensorsFile::open(arguments.data);
  const PipelineSchedule schedule =
      make_pipeline_schedule({.kind = find_pipeline_schedule(arguments.schedule)->kind,
                              .num_ranks = world.world_size(),
                              .num_microbatches = arguments.num_microbatches,
                              .stages_per_rank = arguments.stages_per_rank})
          .value_or_throw();
  const int num_stages = schedule.num_stages();
  const Gpt whole(kModel, kVocabulary, at::make_generator<at::CPUGeneratorImpl>(0));
  std::vector<PipelineStage> stages;
  std::vector<Tensor> parameters;
  for (int number = 0; number < num_stages; ++number) {
    if (schedule.rank_of_stage[static_cast<size_t>(number)] != world.rank()) continue;
    const auto stage = stage_of(whole, number, num_stages);
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : stage->named_parameters()) {
      parameter.value().copy_(data.read(parameter.key()));
      parameters.push_back(parameter.value());
    }
    stages.emplace_back(stage, PipelineStageOptions{.stage = number, .num_stages = num_stages});
  }
  Pipeline pipeline(stages, world, {.schedule = schedule});
  if (arguments.is_tied) {
    pipeline.tie_parameters({{0, "wte.weight"}, {num_stages - 1, "lm_head.weight"}});
  }
  const auto optimizer = make_parity_optimizer(arguments.optimizer, parameters);
  std::ofstream losses;
  if (world.rank() == 0) losses.open(arguments.losses);
  losses.precision(std::numeric_limits<double>::max_digits10);
  const Tensor tokens = data.read("tokens");
  for (int64_t step = 0; step < tokens.size(0); ++step) {
    const Tensor inputs = tokens[step].slice(1, 0, kModel.context).contiguous();
    const Tensor targets = tokens[step].slice(1, 1).contiguous();
    optimizer->zero_grad();
    const auto result = pipeline.step(inputs, targets, next_token_loss, {.broadcast_losses = true});
    optimizer->step();
    if (losses.is_open()) losses << result.loss.item<double>() << '\n';
  }
}

}  // namespace
}  // namespace cadre::train

int main(int argc, char** argv) try {
  if (argc != 7 && argc != 8) {
    std::cerr << "usage: cadre_pipeline_parity DATA SCHEDULE STAGES_PER_RANK MICROBATCHES "
                 "OPTIMIZER LOSSES [tied]\n";
    return 2;
  }
  at::set_num_threads(1);
  auto world = cadre::init_process_group();
  cadre::train::train(world, {.data = argv[1],
                              .schedule = argv[2],
                              .stages_per_rank = std::stoi(argv[3]),
                              .num_microbatches = std::stoi(argv[4]),
                              .optimizer = argv[5],
                              .losses = argv[6],
                              .is_tied = argc == 8});
  world.close();
} catch (const cadre::Error& error) {
  std::cerr << "cadre_pipeline_parity: " << error.what() << '\n';
  return 1;
}
