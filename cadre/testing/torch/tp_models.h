// The models of the equality tests of tensor parallelism: an MLP and a GPT of Cadre's layers, with
// the plans that divide them. The vocabulary, the hidden features and the features of the MLP are
// not divisible by 3 and 4 ranks. The sequence of the GPT can also be divided, with context
// parallelism, among other ranks.
//
// Threads: one for each model. Blocking: like the layers, once they are parallelized.
#pragma once

#include <torch/nn.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/parallel/layers/attention/self_attention.h"
#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/parallel/layers/counter_based_dropout.h"
#include "cadre/parallel/layers/embedding.h"
#include "cadre/parallel/layers/layer_norm.h"
#include "cadre/parallel/layers/linear.h"
#include "cadre/parallel/layers/vocab_parallel_cross_entropy.h"
#include "cadre/parallel/tp/parallelize_module.h"
#include "cadre/testing/torch/wrap_models.h"

namespace cadre::testing {

// A model with the plan by which parallelize_module() divides it.
struct DividedModel : Model {
  virtual std::vector<PlanEntry> plan() const = 0;
  // The random stream of the dropout layers. The training sets its step number before each step.
  std::shared_ptr<DropoutStream> stream = std::make_shared<DropoutStream>();
  // The tensor-parallel ranks, among which the model is divided.
  std::optional<ProcessGroup> group;
  // The context-parallel ranks, among which the sequence is divided.
  std::optional<ContextParallel> context;
};

struct DividedMlp : DividedModel {
  DividedMlp() {
    first = register_module("first", Linear(12, 25));
    second = register_module("second", Linear(25, 10));
    third = register_module("third", Linear(10, 7));
    fourth = register_module("fourth", Linear(7, 3));
  }
  Tensor forward(const Tensor& x) override {
    return fourth(torch::tanh(third(torch::tanh(second(torch::tanh(first(x)))))));
  }
  Tensor loss(const Tensor& output, const Tensor& x) override {
    return (output - x.narrow(1, 0, 3)).pow(2).mean();
  }
  Tensor make_batch(int64_t rows) override {
    return torch::randn({rows, 12}, first->weight.dtype());
  }
  std::vector<PlanEntry> plan() const override {
    return {{"first", ParallelStyle::kColwise},
            {"second", ParallelStyle::kRowwise},
            {.pattern = "third", .style = ParallelStyle::kColwise, .gather_output = true},
            {.pattern = "fourth", .style = ParallelStyle::kRowwise, .input_is_parallel = false}};
  }
  Linear first{nullptr}, second{nullptr}, third{nullptr}, fourth{nullptr};
};

struct GptKind {
  bool is_tied = true;
  bool is_sequence_parallel = false;
};

struct DividedBlockImpl : nn::Module {
  static constexpr int64_t kWidth = 48;
  static constexpr int64_t kHidden = 50;

  DividedBlockImpl(const std::shared_ptr<DropoutStream>& stream, uint64_t first_layer)
      : stream_(stream), layer_(first_layer) {
    norm_1 = register_module("norm_1", LayerNorm(nn::LayerNormOptions({kWidth})));
    attention = register_module("attention",
                                SelfAttention(SelfAttentionOptions{.embed_dim = kWidth,
                                                                   .num_heads = 24,
                                                                   .num_key_value_heads = 12,
                                                                   .bias = false,
                                                                   .dropout = dropout_options()}));
    norm_2 = register_module("norm_2", LayerNorm(nn::LayerNormOptions({kWidth})));
    up = register_module("up", Linear(kWidth, kHidden));
    down = register_module("down", Linear(kHidden, kWidth));
    dropout_1 = register_module("dropout_1", CounterBasedDropout(dropout_options()));
    dropout_2 = register_module("dropout_2", CounterBasedDropout(dropout_options()));
    CounterBasedDropoutOptions hidden = dropout_options();
    hidden.features = kHidden;
    dropout_hidden = register_module("dropout_hidden", CounterBasedDropout(hidden));
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = x + dropout_1(attention(norm_1(x)));
    return h + dropout_2(down(dropout_hidden(torch::gelu(up(norm_2(h))))));
  }
  LayerNorm norm_1{nullptr}, norm_2{nullptr};
  SelfAttention attention{nullptr};
  Linear up{nullptr}, down{nullptr};
  CounterBasedDropout dropout_1{nullptr}, dropout_2{nullptr}, dropout_hidden{nullptr};

 private:
  CounterBasedDropoutOptions dropout_options() {
    return {.p = 0.1, .layer = layer_++, .stream = stream_};
  }
  std::shared_ptr<DropoutStream> stream_;
  uint64_t layer_;
};
TORCH_MODULE(DividedBlock);

struct DividedGpt : DividedModel {
  static constexpr int64_t kTokens = 12;

  explicit DividedGpt(const GptKind& given) : kind(given) {
    constexpr int64_t kWidth = DividedBlockImpl::kWidth;
    stream->seed = 5;
    tokens = register_module("tokens", Embedding(kVocabulary, kWidth));
    positions = register_module("positions", Embedding(kTokens, kWidth));
    first = register_module("first", DividedBlock(stream, 10));
    second = register_module("second", DividedBlock(stream, 20));
    norm = register_module("norm", LayerNorm(nn::LayerNormOptions({kWidth})));
    if (!kind.is_tied) {
      head = register_module("head", Linear(nn::LinearOptions(kWidth, kVocabulary).bias(false)));
    }
  }
  // x: the whole batch. Returns the logits of this rank's tokens and part of the vocabulary.
  Tensor forward(const Tensor& x) override {
    const Tensor own = context ? context->shard(x, 1) : x;
    const Tensor places =
        context ? context->positions(x.device()) : torch::arange(x.size(1), x.device());
    const Tensor h = norm(second(first(tokens(own) + positions(places))));
    return kind.is_tied ? tokens->logits(h) : head(h);
  }
  Tensor loss(const Tensor& output, const Tensor& x) override {
    const Tensor targets = x.roll(-1, 1).masked_fill(x == 3, -100);
    if (context) return loss_of_tokens(output, context->shard(targets, 1));
    if (group) {
      return vocab_parallel_cross_entropy(output, targets, *group, {.vocabulary = kVocabulary});
    }
    return nn::functional::cross_entropy(output.reshape({-1, kVocabulary}), targets.reshape({-1}));
  }
  Tensor make_batch(int64_t rows) override {
    return torch::randint(kVocabulary, {rows, kTokens}, torch::kLong);
  }
  std::vector<PlanEntry> plan() const override {
    std::vector<PlanEntry> entries = {{"tokens", ParallelStyle::kRowwise},
                                      {"*.attention.qkv", ParallelStyle::kColwise},
                                      {"*.attention.output", ParallelStyle::kRowwise},
                                      {"*.up", ParallelStyle::kColwise},
                                      {"*.dropout_hidden", ParallelStyle::kColwise},
                                      {"*.down", ParallelStyle::kRowwise}};
    if (!kind.is_tied) entries.push_back({"head", ParallelStyle::kColwise});
    if (kind.is_sequence_parallel) {
      for (const char* pattern : {"positions", "*.norm_*", "norm", "*.dropout_1", "*.dropout_2"}) {
        entries.push_back({pattern, ParallelStyle::kSequence});
      }
    }
    return entries;
  }
  Tensor loss_of_tokens(const Tensor& output, const Tensor& targets) const {
    const auto count = targets.ne(-100).sum().item<int64_t>();
    const Tensor sum = vocab_parallel_cross_entropy(
        output, targets, *group, {.vocabulary = kVocabulary, .reduction = LossReduction::kSum});
    return context->mean_over_tokens(sum, count);
  }
  GptKind kind;
  Embedding tokens{nullptr}, positions{nullptr};
  DividedBlock first{nullptr}, second{nullptr};
  LayerNorm norm{nullptr};
  Linear head{nullptr};
};

// Makes the model that `test_case.model` names: mlp, gpt_tied, gpt_untied, gpt_tied_sequence or
// gpt_untied_sequence.
inline std::shared_ptr<DividedModel> make_divided_model(const Case& test_case, uint64_t seed) {
  torch::manual_seed(seed);
  std::shared_ptr<DividedModel> model;
  if (test_case.model == "mlp") {
    model = std::make_shared<DividedMlp>();
  } else {
    model = std::make_shared<DividedGpt>(
        GptKind{.is_tied = test_case.model.find("untied") == std::string::npos,
                .is_sequence_parallel = test_case.model.ends_with("sequence")});
  }
  model->to(test_case.dtype);
  return model;
}

}  // namespace cadre::testing
