#include "cadre/train/trainer/evaluation.h"

#include <torch/torch.h>

#include "cadre/train/trainer/strategy/scalar_sum.h"
#include "cadre/train/trainer/tasks/task.h"

namespace cadre::train {
namespace {

constexpr int64_t kBatchSizePerRank = 16;

}  // namespace

std::unique_ptr<DataLoader> make_held_out_loader(const Task& task, const DataRanks& ranks,
                                                 bool is_pinned) {
  return std::make_unique<DataLoader>(
      task.held_out_data(), DataLoaderOptions{.batch_size = kBatchSizePerRank * ranks.size,
                                              .ranks = ranks.group,
                                              .shuffle = false,
                                              .pin_memory = is_pinned});
}

Evaluation evaluate(const Inference& infer, const Task& task, DataLoader& held_out,
                    const ProcessGroup& world, os::System& system) {
  const torch::NoGradGuard no_grad;
  ScalarSum loss;
  ScalarSum num_right;
  double num_samples = 0;
  for (const auto& [data, target] : held_out.epoch(0)) {
    const at::Tensor output = infer(data);  // collective if the model is sharded
    const auto count = static_cast<double>(data.size(0));
    if (count == 0) continue;
    const at::Tensor expected = target.to(output.device(), /*non_blocking=*/true);
    loss.add(task.loss(output, expected), count);
    num_samples += count;
    if (task.is_classification()) num_right.add(output.argmax(-1).eq(expected).sum());
  }
  loss.begin_copy();
  num_right.begin_copy();
  const at::Tensor sums =
      torch::tensor({loss.value(system), num_right.value(system), num_samples}, torch::kFloat64);
  world.all_reduce(sums);
  const auto* values = sums.const_data_ptr<double>();
  Evaluation evaluation{.loss = values[0] / values[2], .bigram_entropy = task.bigram_entropy()};
  if (task.is_classification()) evaluation.accuracy = values[1] / values[2];
  return evaluation;
}

}  // namespace cadre::train
