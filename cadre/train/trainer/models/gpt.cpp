#include "cadre/train/trainer/models/gpt.h"

#include <ATen/ops/linear.h>
#include <torch/torch.h>

#include <cmath>
#include <optional>

#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/attention/context_parallel_attention.h"
#include "cadre/parallel/layers/parallel_linear.h"

namespace cadre::train {
namespace {

namespace nn = torch::nn;

constexpr int64_t kMlpExpansion = 4;
constexpr double kInitialStd = 0.02;

LayerNorm make_norm(int64_t width) {
  return LayerNorm(nn::LayerNormOptions({width}));
}

// Makes one of the model's dropout layers. Number 0 is applied to the embeddings; each block has
// two more.
CounterBasedDropout make_dropout(const ModelConfig& config, int64_t number,
                                 const std::shared_ptr<const DropoutStream>& stream) {
  return CounterBasedDropout(CounterBasedDropoutOptions{
      .p = config.dropout_rate, .layer = static_cast<uint64_t>(number), .stream = stream});
}

// A layer with the rate 0 does nothing, so it is left out.
at::Tensor dropped(CounterBasedDropout& layer, const at::Tensor& input) {
  return layer->options.p == 0 ? input : layer(input);
}

std::optional<double> capacity_of(const ModelConfig& config) {
  if (config.capacity_factor == 0) return std::nullopt;
  return config.capacity_factor;
}

// The experts have no biases. The biases of all experts would be one matrix, which the optimizer
// would treat as weights and apply weight decay to.
MixtureOfExperts make_experts(const ModelConfig& config) {
  return MixtureOfExperts(MixtureOfExpertsOptions{.features = config.width,
                                                  .hidden_features = kMlpExpansion * config.width,
                                                  .num_experts = config.experts,
                                                  .num_selected = config.experts_per_token,
                                                  .normalize_weights = config.experts_per_token > 1,
                                                  .capacity_factor = capacity_of(config),
                                                  .bias = false});
}

Linear make_projection(int64_t num_inputs, int64_t num_outputs, int64_t block_size) {
  Linear projection(num_inputs, num_outputs);
  projection->set_block_size(block_size);
  return projection;
}

}  // namespace

QueryKeyValueImpl::QueryKeyValueImpl(int64_t width, int64_t heads)
    : torch::nn::LinearImpl(width, 3 * width), heads_(heads) {}

at::Tensor QueryKeyValueImpl::forward(const at::Tensor& input) {
  const at::Tensor output = features(input);
  const int64_t head_width = options.in_features() / heads_;
  return output
      .view({output.size(0), output.size(1), 3, output.size(2) / (3 * head_width), head_width})
      .permute({2, 0, 3, 1, 4});
}

at::Tensor QueryKeyValueImpl::features(const at::Tensor& input) const {
  const bool is_separate = weight.dim() == 3;
  const at::Tensor matrix = is_separate ? weight.flatten(0, 1) : weight;
  const at::Tensor vector = is_separate ? bias.flatten() : bias;
  const LayerParallelism* const how = parallelism();
  if (how == nullptr || how->style == ParallelStyle::kReplicated) {
    return at::linear(input, matrix, vector);
  }
  check_features(input, options.in_features());
  return column_parallel_linear(input, matrix, vector, how->group,
                                {.sequence_parallel = how->sequence_parallel});
}

void QueryKeyValueImpl::separate() {
  const int64_t width = options.in_features();
  weight.set_data(weight.detach().view({3, width, width}));
  bias.set_data(bias.detach().view({3, width}));
}

std::shared_ptr<torch::nn::Module> QueryKeyValueImpl::clone(
    const std::optional<torch::Device>& device) const {
  refuse_copy_if_parallelized();
  return layers::with_parameters_of(
      *this, std::make_shared<QueryKeyValueImpl>(options.in_features(), heads_), device);
}

std::vector<NamedTensor> QueryKeyValueImpl::parameters_of_layer() const {
  return {{"weight", weight}, {"bias", bias}};
}

std::optional<int64_t> QueryKeyValueImpl::divided_dim(std::string_view, ParallelStyle style) const {
  return style == ParallelStyle::kColwise ? std::optional<int64_t>(1) : std::nullopt;
}

std::optional<std::string> QueryKeyValueImpl::problem_of(const LayerParallelism& how) const {
  if (how.style == ParallelStyle::kReplicated) return std::nullopt;
  if (how.style != ParallelStyle::kColwise || weight.dim() != 3) {
    return "the layer before attention is divided by heads: separate() it, and divide it kColwise";
  }
  if (heads_ % how.group.world_size() == 0) return std::nullopt;
  return cadre::format("its {} attention heads cannot be divided evenly among {} ranks", heads_,
                       how.group.world_size());
}

GptBlock::GptBlock(const ModelConfig& config, int64_t index,
                   const std::shared_ptr<const DropoutStream>& stream)
    : is_recomputed_(recomputes_activations(config)),
      capacity_factor_(capacity_of(config)),
      attention_norm_(register_module("ln_1", make_norm(config.width))),
      query_key_value_(register_module("attn_c_attn", QueryKeyValue(config.width, config.heads))),
      attention_projection_(register_module(
          "attn_c_proj", make_projection(config.width, config.width, config.width / config.heads))),
      attention_dropout_(register_module("attn_drop", make_dropout(config, 2 * index + 1, stream))),
      mlp_norm_(register_module("ln_2", make_norm(config.width))) {
  const int64_t num_hidden = kMlpExpansion * config.width;
  if (config.experts > 0) {
    experts_ = register_module("mlp_experts", make_experts(config));
  } else {
    mlp_expand_ = register_module("mlp_c_fc", Linear(config.width, num_hidden));
    mlp_projection_ = register_module("mlp_c_proj", Linear(num_hidden, config.width));
  }
  mlp_dropout_ = register_module("mlp_drop", make_dropout(config, 2 * index + 2, stream));
}

void GptBlock::train(bool on) {
  Module::train(on);
  if (has_experts()) experts_->options.capacity_factor = on ? capacity_factor_ : std::nullopt;
}

std::pair<at::Tensor, at::Tensor> GptBlock::forward(const at::Tensor& x) {
  return run_layer([this](const at::Tensor& given) { return compute(given); }, x, is_recomputed_);
}

std::pair<at::Tensor, at::Tensor> GptBlock::compute(const at::Tensor& x) {
  const at::Tensor attended = x + dropped(attention_dropout_, attend(attention_norm_(x)));
  const at::Tensor normalized = mlp_norm_(attended);
  if (has_experts()) {
    const MixtureOfExpertsOutput output = experts_(normalized);
    return {attended + dropped(mlp_dropout_, output.values), output.losses.load_balance};
  }
  const at::Tensor hidden = torch::gelu(mlp_expand_(normalized), /*approximate=*/"tanh");
  return {attended + dropped(mlp_dropout_, mlp_projection_(hidden)), at::Tensor()};
}

at::Tensor GptBlock::attend(const at::Tensor& x) {
  const at::Tensor parts = query_key_value_(x);
  const at::Tensor mixed =
      context() != nullptr
          ? context_parallel_attention(parts[0], parts[1], parts[2], *context(),
                                       {.is_causal = true})
          : at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{},
                                             /*dropout_p=*/0.0, /*is_causal=*/true);
  return attention_projection_(mixed.transpose(1, 2).flatten(2, 3));
}

Gpt::Gpt(const ModelConfig& config, int64_t vocabulary, const at::Generator& generator)
    : context_(config.context),
      vocabulary_(vocabulary),
      is_tied_(config.tied),
      auxiliary_weight_(config.auxiliary_loss),
      stream_(std::make_shared<DropoutStream>()),
      token_embedding_(register_module("wte", Embedding(vocabulary, config.width))),
      position_embedding_(register_module("wpe", Embedding(config.context, config.width))),
      embedding_dropout_(register_module("drop", make_dropout(config, 0, stream_))),
      final_norm_(make_norm(config.width)) {
  stream_->seed = generator.current_seed();
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks_.push_back(register_module(cadre::format("h_{}", i),
                                      std::make_shared<ShardUnit<GptBlock>>(config, i, stream_)));
  }
  register_module("ln_f", final_norm_);
  if (!is_tied_) {
    head_ =
        register_module("lm_head", Linear(nn::LinearOptions(config.width, vocabulary).bias(false)));
  }
  initialize(config.layers, generator);
}

Gpt::Gpt(const Gpt& whole, const GptPart& part)
    : context_(whole.context_),
      vocabulary_(whole.vocabulary_),
      is_tied_(whole.is_tied_),
      has_head_(part.has_head),
      auxiliary_weight_(whole.auxiliary_weight_),
      stream_(whole.stream_) {
  if (part.has_embeddings) {
    token_embedding_ = register_module("wte", whole.token_embedding_);
    position_embedding_ = register_module("wpe", whole.position_embedding_);
    embedding_dropout_ = register_module("drop", whole.embedding_dropout_);
  } else if (part.has_head && is_tied_) {
    token_embedding_ = register_module(
        "wte",
        Embedding(std::dynamic_pointer_cast<EmbeddingImpl>(whole.token_embedding_->clone())));
  }
  for (int64_t i = part.first_block; i < part.end_block; ++i) {
    blocks_.push_back(
        register_module(cadre::format("h_{}", i), whole.blocks_[static_cast<size_t>(i)]));
  }
  if (!part.has_head) return;
  final_norm_ = register_module("ln_f", whole.final_norm_);
  if (!is_tied_) head_ = register_module("lm_head", whole.head_);
}

at::Tensor Gpt::forward(const at::Tensor& data) {
  at::Tensor x = position_embedding_ ? embed(data) : data;
  at::Tensor load_balance;  // the sum over the blocks; undefined if the model has no experts
  for (const auto& block : blocks_) {
    const auto [output, of_block] = block->forward(x);
    x = output;
    load_balance = load_balance.defined() ? load_balance + of_block : of_block;
  }
  const bool has_auxiliary = load_balance.defined() && auxiliary_weight_ > 0;
  auxiliary_loss_ = has_auxiliary ? load_balance * auxiliary_weight_ : at::Tensor();
  if (!has_head_) return x;
  const at::Tensor hidden = final_norm_(x);
  return is_tied_ ? token_embedding_->logits(hidden) : head_(hidden);
}

at::Tensor Gpt::embed(const at::Tensor& tokens) {
  const ContextParallel* const sequence = ContextParallelLayer::context();
  const at::Tensor own = sequence != nullptr ? sequence->shard(tokens, 1) : tokens;
  const at::Tensor positions = sequence != nullptr
                                   ? sequence->positions(tokens.device())
                                   : torch::arange(tokens.size(1), tokens.options());
  return dropped(embedding_dropout_, token_embedding_(own) + position_embedding_(positions));
}

void Gpt::set_rows(const SampledRows& rows) {
  stream_->step = static_cast<uint64_t>(rows.step);
  stream_->first_sample = rows.first;
  stream_->sample_stride = rows.stride;
}

std::vector<PlanEntry> Gpt::plan(bool sequence) const {
  using enum ParallelStyle;
  std::vector<PlanEntry> entries;
  const auto add = [&](ParallelStyle style, std::initializer_list<const char*> patterns) {
    for (const char* pattern : patterns) entries.push_back({.pattern = pattern, .style = style});
  };
  if (token_embedding_) add(kRowwise, {"wte"});
  if (!blocks_.empty()) {
    add(kColwise, {"*.attn_c_attn"});
    add(kRowwise, {"*.attn_c_proj"});
    // The MLPs are not divided if there are experts: experts have uneven numbers of rows, so every
    // process would wait for the largest expert twice in each block.
    if (!blocks_[0]->has_experts()) {
      add(kColwise, {"*.mlp_c_fc"});
      add(kRowwise, {"*.mlp_c_proj"});
    }
  }
  if (head_) add(kColwise, {"lm_head"});
  if (!sequence) return entries;
  if (position_embedding_) add(kSequence, {"wpe", "drop"});
  if (!blocks_.empty()) add(kSequence, {"*.ln_*", "*.attn_drop", "*.mlp_drop"});
  if (has_head_) add(kSequence, {"ln_f"});
  return entries;
}

void Gpt::separate_heads() {
  for (const auto& block : blocks_) block->separate_heads();
}

void Gpt::initialize(int64_t layers, const at::Generator& generator) {
  const torch::NoGradGuard no_grad;
  const double residual_std = kInitialStd / std::sqrt(2.0 * static_cast<double>(layers));
  for (const auto& item : named_parameters()) {
    at::Tensor parameter = item.value();
    if (parameter.dim() >= 2) {
      const bool is_residual =
          item.key().ends_with("c_proj.weight") || item.key().ends_with("down_weight");
      parameter.normal_(0.0, is_residual ? residual_std : kInitialStd, generator);
    } else if (item.key().ends_with("bias")) {
      parameter.zero_();  // the weight of a norm stays 1
    }
  }
}

}  // namespace cadre::train
