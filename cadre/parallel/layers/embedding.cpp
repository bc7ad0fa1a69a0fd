#include "cadre/parallel/layers/embedding.h"

#include <ATen/ops/_assert_async.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

#include <tuple>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/activation_parts.h"
#include "cadre/parallel/layers/parallel_linear.h"
#include "cadre/tensor/group/backward/differentiable.h"
#include "cadre/tensor/mesh/layout.h"

namespace cadre {
namespace {

// Every rank has the same indices, so all ranks check all of them. Otherwise only the rank whose
// rows include an invalid index would throw. On a device the check is a kernel, as in
// torch::nn::Embedding, so that the host does not wait.
void check_indices(const at::Tensor& indices, int64_t vocabulary) {
  if (indices.scalar_type() != at::kLong && indices.scalar_type() != at::kInt) {
    throw Error(ErrorCode::kInvalidArgument,
                format("Embedding: the indices are {}, expected int64 or int32",
                       c10::toString(indices.scalar_type())));
  }
  if (indices.numel() == 0) return;
  if (!indices.is_cpu()) {
    at::_assert_async(indices.ge(0).logical_and(indices.lt(vocabulary)).all(),
                      format("Embedding: an index is not one of the {} entries of the vocabulary, "
                             "0 to {}",
                             vocabulary, vocabulary - 1));
    return;
  }
  const auto [smallest, largest] = at::aminmax(indices);
  const int64_t low = smallest.item<int64_t>();
  const int64_t high = largest.item<int64_t>();
  if (low >= 0 && high < vocabulary) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("Embedding: the indices reach from {} to {}, but the vocabulary has {} "
                     "entries, 0 to {}",
                     low, high, vocabulary, vocabulary - 1));
}

// Returns the rows of this rank's part of the table for the indices (N), which count from its first
// row, and zeros for indices of other ranks. The number of this rank's indices is known to the
// device only, so each index looks up a row, and those of other ranks are cleared.
at::Tensor cleared_rows(const at::Tensor& weight, const at::Tensor& local, int64_t padding) {
  if (weight.size(0) == 0) {
    const at::Tensor no_rows = at::embedding(weight, at::empty({0}, local.options()), padding);
    return at::zeros({local.numel(), weight.size(1)}, weight.options().requires_grad(false))
        .index_add(0, at::empty({0}, local.options()), no_rows);
  }
  const at::Tensor is_elsewhere = local.lt(0).logical_or(local.ge(weight.size(0)));
  return at::embedding(weight, local.clamp(0, weight.size(0) - 1), padding)
      .masked_fill(is_elsewhere.unsqueeze(1), 0);
}

// The same with one lookup for each of this rank's indices.
at::Tensor selected_rows(const at::Tensor& weight, const at::Tensor& local, int64_t padding) {
  const at::Tensor places = local.ge(0).logical_and(local.lt(weight.size(0))).nonzero().squeeze(1);
  const at::Tensor rows = at::embedding(weight, local.index_select(0, places), padding);
  return at::zeros({local.numel(), weight.size(1)}, weight.options().requires_grad(false))
      .index_add(0, places, rows);
}

}  // namespace

at::Tensor EmbeddingImpl::forward(const at::Tensor& indices) {
  const LayerParallelism* const how = parallelism();
  if (how == nullptr || how->style == ParallelStyle::kReplicated) {
    return torch::nn::EmbeddingImpl::forward(indices);
  }
  check_indices(indices, options.num_embeddings());
  if (how->style == ParallelStyle::kRowwise) return rows_of(indices, *how);
  return at::embedding(functional::copy_to_group(weight, how->group),
                       functional::scatter_to_group(indices, how->group),
                       options.padding_idx().value_or(-1));
}

// Each rank looks up the indices that are in its part of the vocabulary and has zeros for the
// others. The sum over the ranks then has the rows for all indices.
at::Tensor EmbeddingImpl::rows_of(const at::Tensor& indices, const LayerParallelism& how) const {
  const Chunk chunk = chunk_of(options.num_embeddings(), how.group.world_size(), how.group.rank());
  const at::Tensor local = indices.reshape({-1}) - chunk.begin;
  // The value -1 means "no padding" to at::embedding. torch::nn::Embedding has already converted a
  // negative padding_idx to a positive one.
  int64_t padding = options.padding_idx().value_or(-1);
  if (padding >= 0) padding -= chunk.begin;
  if (padding < 0 || padding >= chunk.size) padding = -1;
  const at::Tensor part = weight.is_cpu() ? selected_rows(weight, local, padding)
                                          : cleared_rows(weight, local, padding);
  std::vector<int64_t> sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  if (how.sequence_parallel) return reduce_scatter_sequence(part.view(sizes), how.group);
  return functional::reduce_from_group(part.view(sizes), how.group);
}

at::Tensor EmbeddingImpl::logits(const at::Tensor& hidden) const {
  const LayerParallelism* const how = parallelism();
  if (how == nullptr || how->style == ParallelStyle::kReplicated) {
    return at::linear(hidden, weight);
  }
  check_features(hidden, options.embedding_dim());
  if (how->style == ParallelStyle::kSequence) {
    return at::linear(hidden, functional::copy_to_group(weight, how->group));
  }
  const at::Tensor part = column_parallel_linear(hidden, weight, {}, how->group,
                                                 {.sequence_parallel = how->sequence_parallel});
  return how->gather_output ? gather_features(part, how->group, options.num_embeddings()) : part;
}

std::shared_ptr<torch::nn::Module> EmbeddingImpl::clone(
    const std::optional<torch::Device>& device) const {
  refuse_copy_if_parallelized();
  return layers::with_parameters_of(*this, std::make_shared<EmbeddingImpl>(options), device);
}

std::string EmbeddingImpl::options_text() const {
  const auto padding = options.padding_idx();
  return format("padding_idx {}, max_norm {}, norm_type {}, scale_grad_by_freq {}, sparse {}",
                padding ? format("{}", *padding) : "not given",
                options.max_norm() ? format("{}", *options.max_norm()) : "not given",
                options.norm_type(), options.scale_grad_by_freq(), options.sparse());
}

std::optional<int64_t> EmbeddingImpl::divided_dim(std::string_view, ParallelStyle style) const {
  return style == ParallelStyle::kRowwise ? std::optional<int64_t>(0) : std::nullopt;
}

std::optional<std::string> EmbeddingImpl::problem_of(const LayerParallelism& how) const {
  if (how.style == ParallelStyle::kColwise) {
    return "an embedding can be divided by its vocabulary only (kRowwise), or be kSequence or "
           "kReplicated";
  }
  if (!how.input_is_parallel) {
    return "an embedding takes whole indices in every style; leave out input_is_parallel = false";
  }
  if (how.style == ParallelStyle::kReplicated) return std::nullopt;
  if (options.max_norm() || options.scale_grad_by_freq() || options.sparse()) {
    return "an embedding with max_norm, scale_grad_by_freq or sparse changes or counts rows "
           "that another rank has; construct it without";
  }
  return std::nullopt;
}

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(const torch::nn::EmbeddingOptions& given,
                                                       const ProcessGroup& group,
                                                       const VocabParallelOptions& parallel)
    : EmbeddingImpl(given) {
  layers::parallelize_new(*this,
                          {.group = group,
                           .style = ParallelStyle::kRowwise,
                           .sequence_parallel = parallel.sequence_parallel},
                          "VocabParallelEmbedding");
}

}  // namespace cadre
