#include "cadre/train/training/divided_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/deferred/deferred_init.h"
#include "cadre/parallel/layers/tensor_parallel_layer.h"
#include "cadre/parallel/tp/parallelize_module.h"
#include "cadre/tensor/group/agreement.h"

namespace cadre::training_parts {
namespace {

// Returns the layers of libtorch that Cadre has, too, for an error.
std::string layers_to_replace(const torch::nn::Module& module) {
  std::string text;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    const torch::nn::Module* const layer = item.value().get();
    if (dynamic_cast<const TensorParallelLayer*>(layer) != nullptr) continue;
    const char* twin = nullptr;
    if (dynamic_cast<const torch::nn::LinearImpl*>(layer) != nullptr) twin = "Linear";
    if (dynamic_cast<const torch::nn::EmbeddingImpl*>(layer) != nullptr) twin = "Embedding";
    if (dynamic_cast<const torch::nn::LayerNormImpl*>(layer) != nullptr) twin = "LayerNorm";
    if (twin != nullptr) {
      text += format("{}{} by cadre::{}", text.empty() ? "" : ", ", item.key(), twin);
    }
  }
  return text;
}

std::vector<PlanEntry> plan_of(const torch::nn::Module& module, const TrainingOptions& options) {
  std::vector<PlanEntry> plan = tensor_parallel_plan(module, {.whole_logits = true});
  plan.insert(plan.end(), options.plan.begin(), options.plan.end());
  if (!plan.empty()) return plan;
  const std::string layers = layers_to_replace(module);
  throw Error(
      ErrorCode::kInvalidArgument,
      format(
          "{}: the degree tensor is above 1, and no layer of the module knows how it is divided; "
          "{}name the layers of Cadre in options.plan, or use a cadre::TransformerBlock",
          kCall, layers.empty() ? "" : format("replace {}, and ", layers)));
}

bool has_deferred_parameters(const torch::nn::Module& module) {
  return std::ranges::any_of(module.parameters(), is_deferred);
}

bool has_layer_of_whole_sequences(const torch::nn::Module& module) {
  for (const auto& part : module.modules()) {
    const auto* const layer = dynamic_cast<const ContextParallelLayer*>(part.get());
    if (layer != nullptr && layer->takes_whole_sequences()) return true;
  }
  return false;
}

// Three sums of a rank's tensors. Tensors that are equal up to rounding have close sums.
struct Sums {
  uint64_t sizes = 0;  // a digest
  std::array<double, 3> values = {};
};
constexpr size_t kNumWords = 4;
constexpr double kTolerance = 0.01;  // relative: low precision on different processors

Sums sums_of(std::span<const at::Tensor> tensors) {
  const at::NoGradGuard no_grad;
  Sums result;
  std::string sizes;
  for (const at::Tensor& tensor : tensors) {
    sizes += c10::str(tensor.sizes(), tensor.dtype());
    const at::Tensor values = tensor.detach().to(at::kCPU, at::kDouble).flatten();
    const at::Tensor weights = at::arange(values.numel(), at::kDouble).remainder(89).add(1);
    result.values[0] += values.sum().item<double>();
    result.values[1] += values.abs().sum().item<double>();
    result.values[2] += values.abs().mul(weights).sum().item<double>() / 45;  // the mean weight
  }
  result.sizes = fnv1a(sizes);
  return result;
}

bool are_close(const Sums& a, const Sums& b) {
  if (a.sizes != b.sizes) return false;
  for (size_t i = 0; i < a.values.size(); ++i) {
    const double limit = kTolerance * std::max(a.values[1], b.values[1]);
    if (std::isfinite(limit) && !(std::abs(a.values[i] - b.values[i]) <= limit)) return false;
  }
  return true;
}

// Returns a rank of the group whose tensors differ from those of rank 0; nullopt if there is none.
// Collective.
std::optional<size_t> different_rank(const ProcessGroup& group,
                                     std::span<const at::Tensor> tensors) {
  const auto words = gather_words(group, kCall, kNumWords, [&]() -> std::vector<int64_t> {
    const Sums own = sums_of(tensors);
    return {std::bit_cast<int64_t>(own.sizes), std::bit_cast<int64_t>(own.values[0]),
            std::bit_cast<int64_t>(own.values[1]), std::bit_cast<int64_t>(own.values[2])};
  });
  const auto sums = [&words](size_t rank) {
    return Sums{
        .sizes = std::bit_cast<uint64_t>(words[rank][0]),
        .values = {std::bit_cast<double>(words[rank][1]), std::bit_cast<double>(words[rank][2]),
                   std::bit_cast<double>(words[rank][3])}};
  };
  for (size_t rank = 1; rank < words.size(); ++rank) {
    if (!are_close(sums(rank), sums(0))) return rank;
  }
  return std::nullopt;
}

}  // namespace

DividedModel::DividedModel(const std::shared_ptr<torch::nn::Module>& module,
                           const TrainingDivision& division, const TrainingOptions& options)
    : module_(module),
      copy_(division.copy()),
      tokens_(division.context()),
      form_(options.context_form),
      takes_whole_sequences_(module != nullptr && has_layer_of_whole_sequences(*module)) {
  if (module != nullptr && division.stages() && !has_deferred_parameters(*module)) {
    make_equal(*module, division.world(), kCall);
  }
  if (!division.tensor()) return;
  layers_ = division.tensor()->group("tp");
  std::vector<PlanEntry> plan;
  check_on_all_ranks(division.world(), kCall, [&] {
    if (module != nullptr) plan = plan_of(*module, options);
  });
  // The wrapper of the strategy throws for a null module.
  if (module != nullptr) records_ = parallelize_module(*module, *division.tensor(), plan);
}

const ContextParallel& DividedModel::context_of(int64_t num_tokens) {
  const auto found = contexts_.find(num_tokens);
  const ContextParallel& context =
      found != contexts_.end()
          ? found->second
          : contexts_
                .emplace(num_tokens,
                         ContextParallel(*tokens_, {.num_tokens = num_tokens, .form = form_}))
                .first->second;
  if (context_ != &context) set_context_parallel(*module_, context);
  context_ = &context;
  return context;
}

at::Tensor DividedModel::own_tokens(const at::Tensor& argument) {
  if (takes_whole_sequences_ && sizes_) return argument;
  const auto has_tokens = [&] {
    return argument.dim() >= 2 &&
           (!sizes_ || (argument.size(0) == (*sizes_)[0] && argument.size(1) == (*sizes_)[1]));
  };
  if (!has_tokens()) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: an argument of the forward has the sizes {}; with the degree context "
                       "every tensor is (rows, tokens, ...){}",
                       kCall, c10::str(argument.sizes()),
                       sizes_ ? format(", as the first one with {} rows and {} tokens",
                                       (*sizes_)[0], (*sizes_)[1])
                              : ""));
  }
  if (!sizes_) sizes_ = {argument.size(0), argument.size(1)};
  const ContextParallel& context = context_of((*sizes_)[1]);
  return takes_whole_sequences_ ? argument : context.shard(argument, 1);
}

at::Tensor DividedModel::whole_tokens(const at::Tensor& result) const {
  if (context_ == nullptr || result.dim() < 2 || result.size(1) != context_->num_own_tokens()) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: the forward returned a tensor with the sizes {}; with the degree "
                       "context every result is (rows, tokens, ...), with the {} tokens of this "
                       "rank: compute what needs all tokens in the loss",
                       kCall, c10::str(result.sizes()), context_ ? context_->num_own_tokens() : 0));
  }
  return context_->unshard(result, 1);
}

void DividedModel::check_inputs(std::span<const at::Tensor> inputs) {
  if (!compares_inputs()) return;
  const std::optional<size_t> rank = different_rank(*copy_, inputs);
  has_compared_inputs_ = !rank;
  if (!rank) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: the ranks 0 and {} of {} that have one copy of the model together got "
                     "different rows; divide a batch by the rank in training.division().rows(), or "
                     "read it from training.loader()",
                     kCall, *rank, copy_->world_size()));
}

void DividedModel::check_outputs(std::span<const at::Tensor> outputs) {
  bool& is_compared = has_compared_outputs_[module_->is_training() ? 1 : 0];
  if (!layers_ || is_compared) return;
  const std::optional<size_t> rank = different_rank(*layers_, outputs);
  is_compared = !rank;
  if (!rank) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: the outputs of the module differ on the ranks 0 and {} that divide its "
                     "layers: give the layer that makes the outputs .gather_output = true in the "
                     "plan, or make it row-parallel; and draw no random numbers of each rank "
                     "(instead of torch::nn::Dropout use cadre::CounterBasedDropout)",
                     kCall, *rank));
}

}  // namespace cadre::training_parts
