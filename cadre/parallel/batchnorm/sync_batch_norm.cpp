#include "cadre/parallel/batchnorm/sync_batch_norm.h"

#include <torch/nn/functional/batchnorm.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/batchnorm/batch_norm_operator.h"
#include "cadre/parallel/batchnorm/synchronous_layer.h"
#include "cadre/tensor/group/agreement.h"

namespace cadre {
namespace {

constexpr const char* kCall = "convert_sync_batchnorm";

struct Found {
  std::string name;
  torch::nn::Module* module;
  torch::nn::BatchNormOptions options;
  std::vector<at::Tensor> tensors;  // those of weight, bias and running statistics that exist
};

// Appends the module if it is a batch normalization of this type.
template <typename Norm>
bool append_if(torch::nn::Module& module, const std::string& name, std::vector<Found>& found) {
  auto* const norm = dynamic_cast<Norm*>(&module);
  if (norm == nullptr) return false;
  std::vector<at::Tensor> tensors = {norm->weight, norm->bias, norm->running_mean,
                                     norm->running_var};
  std::erase_if(tensors, [](const at::Tensor& tensor) { return !tensor.defined(); });
  found.push_back(
      {.name = name, .module = &module, .options = norm->options, .tensors = std::move(tensors)});
  return true;
}

void find_layers(torch::nn::Module& module, const std::string& name, std::vector<Found>& found) {
  const bool is_listed =
      std::ranges::any_of(found, [&](const Found& other) { return other.module == &module; });
  if (is_listed) return;
  if (append_if<torch::nn::BatchNorm1dImpl>(module, name, found)) return;
  if (append_if<torch::nn::BatchNorm2dImpl>(module, name, found)) return;
  if (append_if<torch::nn::BatchNorm3dImpl>(module, name, found)) return;
  if (append_if<SyncBatchNormImpl>(module, name, found)) return;
  for (const auto& child : module.named_children()) {
    find_layers(*child.value(), name.empty() ? child.key() : name + "." + child.key(), found);
  }
}

void check_layer(const Found& layer) {
  if (batchnorm::layer_of(*layer.module) != nullptr) {
    throw Error(
        ErrorCode::kInvalidArgument,
        format("{}: \"{}\" is synchronous already. Convert a module once", kCall, layer.name));
  }
  const bool has_identity = layer.options.affine() || layer.options.track_running_stats();
  const bool is_own_type = dynamic_cast<const SyncBatchNormImpl*>(layer.module) != nullptr;
  if (!has_identity && !is_own_type) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: \"{}\" has neither a weight nor running statistics, by which its "
                       "operations could be recognized. Set affine(true) or "
                       "track_running_stats(true), or use cadre::SyncBatchNorm in its place",
                       kCall, layer.name));
  }
}

std::string text_of(const torch::nn::BatchNormOptions& options) {
  return format("num_features {}, eps {}, momentum {}, affine {}, track_running_stats {}",
                options.num_features(), options.eps(),
                options.momentum() ? format("{}", *options.momentum()) : "none", options.affine(),
                options.track_running_stats());
}

std::optional<at::Tensor> if_any(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// Counts the batch and returns by how much it changes the running statistics.
double counted_momentum(const torch::nn::BatchNormOptions& options, at::Tensor& num_batches) {
  if (num_batches.defined()) num_batches += 1;
  if (options.momentum()) return *options.momentum();
  return num_batches.defined() ? 1.0 / num_batches.item<double>() : 0.0;
}

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& norm_options)
    : NormImplBase(norm_options) {}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  const auto layer = batchnorm::layer_of(*this);
  if (is_training() && layer == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "SyncBatchNorm: the layer has no ranks yet. Call "
                "cadre::convert_sync_batchnorm(model, ranks) before the first forward in training "
                "mode");
  }
  _check_input_dim(input);
  if (is_training() && !layer->is_alone()) {
    return batchnorm::synchronous_batch_norm(
        layer, input, {.weight = if_any(weight), .bias = if_any(bias), .eps = options.eps()},
        {.mean = running_mean,
         .variance = running_var,
         .momentum = counted_momentum(options, num_batches_tracked)});
  }
  const double momentum = is_training() ? counted_momentum(options, num_batches_tracked) : 0.0;
  return torch::nn::functional::detail::batch_norm(input, running_mean, running_var, weight, bias,
                                                   is_training() || !options.track_running_stats(),
                                                   momentum, options.eps());
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  if (input.dim() >= 2) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("SyncBatchNorm: the input has shape {}; expected (N, {}, ...)",
                     list_of(input.sizes()), options.num_features()));
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "cadre::SyncBatchNorm(" << text_of(options) << ")";
}

std::vector<std::string> convert_sync_batchnorm(torch::nn::Module& module, const Ranks& ranks) {
  const ProcessGroup& parent = ranks.group();
  std::vector<Found> found;
  const auto make_fields = [&] {
    find_layers(module, "", found);
    std::vector<AgreedField> fields = {
        {"the number of batch normalizations", format("{}", found.size())}};
    for (const Found& layer : found) {
      check_layer(layer);
      fields.push_back({format("\"{}\"", layer.name), text_of(layer.options)});
    }
    return fields;
  };
  check_equal_on_all_ranks(parent, kCall, make_fields, "convert the same model on all ranks");
  auto names = std::make_shared<std::vector<std::string>>();
  for (const Found& layer : found) names->push_back(layer.name);
  if (found.empty()) return {};
  // The layers have a group of their own, so that their messages do not depend on the order in
  // which a wrapper issues its reductions.
  const ProcessGroup group =
      parent.world_size() == 1
          ? parent
          : *parent.split({.color = 0, .key = parent.rank(), .name = "sync_batch_norm"});
  for (size_t i = 0; i < found.size(); ++i) {
    const auto layer = std::make_shared<batchnorm::SynchronousLayer>(
        group, names, i, found[i].options.num_features());
    layer->train(found[i].module->is_training());
    found[i].module->register_module(batchnorm::kChildName, layer);
    batchnorm::make_synchronous(layer, found[i].tensors);
  }
  return *names;
}

}  // namespace cadre
