// The model of the tests of meshes of several axes: a decoder of two blocks that can be cut into up
// to four stages, with a tied or an untied head, counter-based dropout, sizes that are not
// divisible by 4 ranks, and, if requested, a layer of experts. A parameter has the same name in a
// stage as in the whole decoder.
//
// Threads: one for each model. Blocking: like the layers, once they are divided.
#pragma once

#include <torch/nn.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/parallel/ep/mixture_of_experts.h"
#include "cadre/parallel/fsdp/shard_unit.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/testing/torch/tp_models.h"

namespace cadre::testing {

struct AxesGptKind {
  bool is_tied = true;
  bool is_sequence_parallel = false;
  bool has_experts = false;
};

// Stage `stage` of `num_stages` of the decoder. The embeddings, the two blocks and the head are
// divided among at most four stages; with one stage this is the whole decoder.
struct AxesGpt : nn::Module {
  static constexpr int64_t kTokens = 12;
  static constexpr int64_t kWidth = DividedBlockImpl::kWidth;
  static constexpr int kParts = 4;
  using Block = nn::ModuleHolder<ShardUnit<DividedBlockImpl>>;

  explicit AxesGpt(const AxesGptKind& given, int given_stage = 0, int given_count = 1)
      : kind(given), stage(given_stage), num_stages(given_count) {
    stream->seed = 5;
    if (has(0) || (kind.is_tied && has(3))) {
      tokens = register_module("tokens", Embedding(kVocabulary, kWidth));
    }
    if (has(0)) positions = register_module("positions", Embedding(kTokens, kWidth));
    if (has(1)) first = register_module("first", Block(stream, 10));
    if (has(2)) second = register_module("second", Block(stream, 20));
    if (!has(3)) return;
    if (kind.has_experts) {
      experts = register_module("experts",
                                MixtureOfExperts(MixtureOfExpertsOptions{
                                    .features = kWidth, .hidden_features = 10, .num_experts = 4}));
    }
    norm = register_module("norm", LayerNorm(nn::LayerNormOptions({kWidth})));
    if (!kind.is_tied) {
      head = register_module("head", Linear(nn::LinearOptions(kWidth, kVocabulary).bias(false)));
    }
  }

  bool has(int part) const {
    return part >= kParts * stage / num_stages && part < kParts * (stage + 1) / num_stages;
  }
  bool has_block() const { return has(1) || has(2); }

  // x: whole sequences of tokens (B, T) for the first stage; for others, the output of the previous
  // stage. The last stage returns the logits of this rank's tokens and its part of the vocabulary.
  Tensor forward(const Tensor& x) {
    Tensor h = x;
    if (has(0)) {
      const Tensor own = context ? context->shard(x, 1) : x;
      h = tokens(own) + positions(context ? context->positions() : torch::arange(x.size(1)));
    }
    if (in_forward) in_forward();
    if (in_backward && h.requires_grad()) h.register_hook([this](const Tensor&) { in_backward(); });
    if (has(1)) h = first(h);
    if (has(2)) h = second(h);
    if (!has(3)) return h;
    if (kind.has_experts) {
      const auto output = experts(h);
      router_losses = output.losses;
      h = h + output.values;
    }
    h = norm(h);
    return kind.is_tied ? tokens->logits(h) : head(h);
  }

  // Returns the entries of the tensor-parallel plan for the layers that this stage has.
  std::vector<PlanEntry> plan() const {
    using enum ParallelStyle;
    std::vector<PlanEntry> entries;
    if (tokens) entries.push_back({"tokens", kRowwise});
    if (has_block()) {
      entries.insert(entries.end(), {{"*.attention.qkv", kColwise},
                                     {"*.attention.output", kRowwise},
                                     {"*.up", kColwise},
                                     {"*.dropout_hidden", kColwise},
                                     {"*.down", kRowwise}});
    }
    if (head) entries.push_back({"head", kColwise});
    if (!kind.is_sequence_parallel) return entries;
    if (has(0)) entries.push_back({"positions", kSequence});
    if (has_block()) {
      entries.insert(
          entries.end(),
          {{"*.norm_*", kSequence}, {"*.dropout_1", kSequence}, {"*.dropout_2", kSequence}});
    }
    if (has(3)) entries.push_back({"norm", kSequence});
    return entries;
  }

  AxesGptKind kind;
  int stage;
  int num_stages;
  std::shared_ptr<DropoutStream> stream = std::make_shared<DropoutStream>();
  std::optional<ContextParallel> context;
  // The router's auxiliary losses of the last forward.
  RouterLosses router_losses;
  // Hooks that run before the blocks in forward, and after them in backward. A test sets them to
  // make a rank fail or wait there.
  std::function<void()> in_forward, in_backward;
  Embedding tokens{nullptr}, positions{nullptr};
  Block first{nullptr}, second{nullptr};
  MixtureOfExperts experts{nullptr};
  LayerNorm norm{nullptr};
  Linear head{nullptr};
};

inline std::shared_ptr<AxesGpt> make_axes_gpt(const AxesGptKind& kind, torch::ScalarType dtype,
                                              uint64_t seed) {
  torch::manual_seed(seed);
  const auto model = std::make_shared<AxesGpt>(kind);
  model->to(dtype);
  return model;
}

// Returns one stage of the model `whole`, with copies of its weights.
inline std::shared_ptr<AxesGpt> stage_of(const AxesGpt& whole, int stage, int num_stages) {
  const auto part = std::make_shared<AxesGpt>(whole.kind, stage, num_stages);
  const torch::NoGradGuard no_grad;
  const auto values = whole.named_parameters();
  for (auto& parameter : part->named_parameters()) {
    parameter.value().set_data(values[parameter.key()].detach().clone());
  }
  return part;
}

inline Tensor axes_targets(const Tensor& tokens) {
  return (tokens * 3 + tokens.roll(1, 1)).remainder(kVocabulary);
}

}  // namespace cadre::testing
