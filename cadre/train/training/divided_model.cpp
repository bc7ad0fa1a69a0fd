#include "cadre/train/training/divided_model.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <string_view>

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

// Returns what all ranks must have before the copies divide their layers, each on its own.
std::vector<AgreedField> fields_of(const torch::nn::Module& module,
                                   const std::vector<PlanEntry>& plan) {
  Fnv1a tensors;
  for (const auto& parameter : module.named_parameters()) {
    tensors.add(parameter.key());
    tensors.add(c10::str(parameter.value().sizes(), parameter.value().dtype()));
  }
  std::string entries;
  for (const PlanEntry& entry : plan) {
    entries += format("{}\"{}\" {}{}{}", entries.empty() ? "" : ", ", entry.pattern,
                      to_string(entry.style), entry.gather_output ? " gather_output" : "",
                      entry.input_is_parallel ? "" : " input_is_parallel = false");
  }
  return {{"the module", format("one whose parameters have the digest {:x}", tensors.value())},
          {"the plan", entries}};
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

// Returns a hash of the sizes, the dtypes and the bits of tensors.
int64_t digest_of(std::span<const at::Tensor> tensors, bool with_values) {
  Fnv1a hash;
  for (const at::Tensor& tensor : tensors) {
    hash.add(c10::str(tensor.sizes(), tensor.dtype()));
    if (!with_values) continue;
    const at::Tensor values = tensor.detach().to(at::kCPU).contiguous();
    hash.add(std::string_view(static_cast<const char*>(values.const_data_ptr()), values.nbytes()));
  }
  return static_cast<int64_t>(hash.value());
}

// Returns a rank of the group with another number than rank 0; nullopt if there is none.
// Collective.
std::optional<size_t> different_rank(const ProcessGroup& group,
                                     const std::function<int64_t()>& number) {
  const auto words =
      gather_words(group, kCall, 1, [&]() -> std::vector<int64_t> { return {number()}; });
  for (size_t rank = 1; rank < words.size(); ++rank) {
    if (words[rank] != words[0]) return rank;
  }
  return std::nullopt;
}

// Returns whether the tensors are those of rank 0 up to rounding; low precision differs most
// between processors. Collective.
bool are_those_of_rank_0(std::span<const at::Tensor> tensors, const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  bool are_close = true;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor first = tensor.detach().contiguous().clone();
    group.broadcast(first, {.root = 0});
    if (!first.is_floating_point() || first.numel() == 0) continue;
    const double limit =
        (first.element_size() < 4 ? 5e-2 : 1e-3) * first.abs().max().to(at::kDouble).item<double>();
    const double difference = (tensor.detach() - first).abs().max().to(at::kDouble).item<double>();
    are_close = are_close && (std::isnan(limit) || difference <= limit);
  }
  return are_close;
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
  check_equal_on_all_ranks(
      division.world(), kCall,
      [&]() -> std::vector<AgreedField> {
        if (module == nullptr) return {};  // the wrapper of the strategy throws
        materialize(*module);
        plan = plan_of(*module, options);
        return fields_of(*module, plan);
      },
      "pass the same module and plan on all ranks");
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
  if (argument.requires_grad() && at::GradMode::is_enabled()) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: an argument of the forward requires grad; with the degree context each "
                       "rank would have the gradient of its own tokens only: compute it in the "
                       "module, or choose another degree",
                       kCall));
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
  const std::optional<size_t> rank =
      different_rank(*copy_, [&] { return digest_of(inputs, /*with_values=*/true); });
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
  std::optional<size_t> rank =
      different_rank(*layers_, [&] { return digest_of(outputs, /*with_values=*/false); });
  if (!rank) {
    const bool is_equal = are_those_of_rank_0(outputs, *layers_);
    rank = different_rank(*layers_, [&] { return is_equal ? 0 : layers_->rank(); });
  }
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
