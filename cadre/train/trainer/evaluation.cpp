#include "cadre/train/trainer/evaluation.h"

#include <torch/torch.h>

#include "cadre/train/trainer/tasks/task.h"

namespace cadre::train {
namespace {

constexpr int64_t kBatchSizePerRank = 16;

}  // namespace

std::unique_ptr<DataLoader> make_held_out_loader(const Task& task, const DataRanks& ranks) {
  return std::make_unique<DataLoader>(
      task.held_out_data(),
      DataLoaderOptions{
          .batch_size = kBatchSizePerRank * ranks.size, .ranks = ranks.group, .shuffle = false});
}

Evaluation evaluate(const Inference& infer, const Task& task, DataLoader& held_out,
                    const ProcessGroup& world) {
  const torch::NoGradGuard no_grad;
  double loss = 0;
  double num_right = 0;
  double num_samples = 0;
  for (const auto& [data, target] : held_out.epoch(0)) {
    const at::Tensor output = infer(data);  // collective if the model is sharded
    const auto count = static_cast<double>(data.size(0));
    if (count == 0) continue;
    loss += task.loss(output, target).item<double>() * count;
    num_samples += count;
    if (task.is_classification()) {
      num_right += static_cast<double>(output.argmax(-1).eq(target).sum().item<int64_t>());
    }
  }
  const at::Tensor sums = torch::tensor({loss, num_right, num_samples}, torch::kFloat64);
  world.all_reduce(sums);
  const auto* values = sums.const_data_ptr<double>();
  Evaluation evaluation{.loss = values[0] / values[2], .bigram_entropy = task.bigram_entropy()};
  if (task.is_classification()) evaluation.accuracy = values[1] / values[2];
  return evaluation;
}

}  // namespace cadre::train
