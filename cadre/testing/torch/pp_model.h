// The model of the tests of pipelines: a small language model that can be divided into any number
// of stages. Several tensors, integers among them, pass from stage to stage; stages have different
// numbers of layers; one weight is frozen, and one is used twice in a stage.
//
// Threads: one for each model. Blocking: never.
#pragma once

#include <torch/nn.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace cadre::testing {

using torch::Tensor;

// Returns values that are equal on all ranks and differ between offsets.
inline Tensor filled(const std::vector<int64_t>& sizes, double offset) {
  const Tensor values = torch::empty(sizes, torch::kDouble);
  return values.copy_((torch::arange(values.numel(), torch::kDouble) + offset).sin().view(sizes) /
                      3);
}

struct StageNet : torch::nn::Module {
  static constexpr int64_t kWords = 11;
  static constexpr int64_t kWidth = 6;

  StageNet(int number, int count) : stage(number), num_stages(count) {
    const double offset = 100.0 * number;
    if (is_first()) table = register_parameter("table", filled({kWords, kWidth}, offset + 1));
    for (int i = 0; i < num_blocks(); ++i) {
      up.push_back(register_parameter("up" + std::to_string(i),
                                      filled({kWidth, kWidth}, offset + 10 * i + 2),
                                      /*requires_grad=*/!(stage % 3 == 1 && i == 0)));
      bias.push_back(
          register_parameter("bias" + std::to_string(i), filled({kWidth}, offset + 10 * i + 3)));
      norm.push_back(register_module("norm" + std::to_string(i),
                                     torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}))));
      norm.back()->to(torch::kDouble);
    }
    if (is_last()) head = register_parameter("head", filled({kWords, kWidth}, offset + 4));
  }

  bool is_first() const { return stage == 0; }
  bool is_last() const { return stage == num_stages - 1; }
  int num_blocks() const { return 1 + stage % 2; }

  // Each stage maps (tokens) or (hidden, tokens, skip) to (hidden, tokens, skip), and the last one
  // to (logits). hidden and skip: (B, T, kWidth); tokens: (B, T) int64; logits: (B, T, kWords).
  std::vector<Tensor> forward(const std::vector<Tensor>& inputs) {
    ++num_forwards;
    const Tensor& tokens = is_first() ? inputs[0] : inputs[1];
    Tensor hidden = is_first() ? torch::embedding(table, tokens) : inputs[0];
    const Tensor skip = is_first() ? torch::tanh(hidden) : inputs[2];
    for (size_t i = 0; i < up.size(); ++i) {
      Tensor x = torch::tanh(torch::linear(norm[i](hidden), up[i], bias[i]));
      if (stage % 4 == 2) x = torch::tanh(torch::linear(x, up[i], bias[i]));
      hidden = hidden + x + 0.1 * skip + 0.01 * tokens.unsqueeze(-1);
    }
    if (is_last()) return {torch::linear(hidden, head)};
    return {hidden, tokens, skip};
  }

  int stage;
  int num_stages;
  int num_forwards = 0;
  Tensor table;
  Tensor head;
  std::vector<Tensor> up, bias;
  std::vector<torch::nn::LayerNorm> norm;
};

inline Tensor cross_entropy(const Tensor& logits, const Tensor& target) {
  return torch::nn::functional::cross_entropy(logits.reshape({-1, StageNet::kWords}),
                                              target.reshape({-1}));
}

inline std::vector<std::shared_ptr<StageNet>> all_stages(int num_stages) {
  std::vector<std::shared_ptr<StageNet>> stages;
  for (int stage = 0; stage < num_stages; ++stage) {
    stages.push_back(std::make_shared<StageNet>(stage, num_stages));
  }
  return stages;
}

// Runs all stages one after the other in one process.
inline Tensor forward_all(const std::vector<std::shared_ptr<StageNet>>& stages,
                          const Tensor& tokens) {
  std::vector<Tensor> values{tokens};
  for (const auto& stage : stages) values = stage->forward(values);
  return values[0];
}

// Returns token ids of shape (rows, 5), which differ between steps.
inline Tensor tokens_of(int64_t rows, int step) {
  const Tensor numbers = torch::arange(rows * 5, torch::kLong) * 7 + step * 3;
  return (numbers + numbers.floor_divide(4)).remainder(StageNet::kWords).view({rows, 5});
}
inline Tensor targets_of(const Tensor& tokens) {
  return (tokens * 3 + 1).remainder(StageNet::kWords);
}

}  // namespace cadre::testing
