#include "cadre/parallel/layers/attention/self_attention.h"

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/attention/context_parallel_attention.h"
#include "cadre/parallel/layers/attention/plain_attention.h"

namespace cadre {
namespace {

SelfAttentionOptions checked(SelfAttentionOptions options) {
  if (options.num_key_value_heads == 0) options.num_key_value_heads = options.num_heads;
  constexpr int64_t kMaxDim = int64_t{1} << 40;
  const bool is_positive = options.embed_dim > 0 && options.embed_dim <= kMaxDim &&
                           options.num_heads > 0 && options.num_key_value_heads > 0;
  if (!is_positive || options.embed_dim % options.num_heads != 0 ||
      options.num_heads % options.num_key_value_heads != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                format("SelfAttention: embed_dim {} must be a multiple of num_heads {}, and that a "
                       "multiple of num_key_value_heads {}; all of them at least 1",
                       options.embed_dim, options.num_heads, options.num_key_value_heads));
  }
  check_dropout(options.dropout, "SelfAttention");
  return options;
}

int64_t head_dim(const SelfAttentionOptions& options) {
  return options.embed_dim / options.num_heads;
}

// Returns the number of query heads that share one key and value head.
int64_t group_size(const SelfAttentionOptions& options) {
  return options.num_heads / options.num_key_value_heads;
}

}  // namespace

SelfAttentionImpl::SelfAttentionImpl(const SelfAttentionOptions& given) : options(checked(given)) {
  const int64_t heads_of_a_group = group_size(options) + 2;
  const int64_t features = options.num_key_value_heads * heads_of_a_group * head_dim(options);
  qkv = register_module(
      "qkv", Linear(torch::nn::LinearOptions(options.embed_dim, features).bias(options.bias)));
  output = register_module(
      "output",
      Linear(torch::nn::LinearOptions(options.embed_dim, options.embed_dim).bias(options.bias)));
  qkv->set_block_size(heads_of_a_group * head_dim(options));
  output->set_block_size(group_size(options) * head_dim(options));
}

at::Tensor SelfAttentionImpl::forward(const at::Tensor& input) {
  if (input.dim() != 3 || input.size(2) != options.embed_dim) {
    throw Error(ErrorCode::kInvalidArgument,
                format("SelfAttention: the input has the sizes {}, expected (B, T, {}); one "
                       "sequence without a batch is x.unsqueeze(0)",
                       list_of(input.sizes()), options.embed_dim));
  }
  const int64_t size = group_size(options);
  // Shape (B, T, key and value heads of this rank, query heads of each plus 2, head_dim), where the
  // 2 are the key and the value.
  const at::Tensor features = qkv->forward(input);
  const int64_t num_groups = features.size(2) / ((size + 2) * head_dim(options));
  const at::Tensor heads = features.unflatten(2, {num_groups, size + 2, head_dim(options)});
  const int64_t num_tokens = heads.size(1);
  const auto head = [&](int64_t index) { return heads.select(3, index).transpose(1, 2); };
  const at::Tensor query =
      // Shape (B, heads, T, head_dim).
      heads.narrow(3, 0, size).flatten(2, 3).transpose(1, 2);
  const at::Tensor result = attend(query, head(size), head(size + 1));
  return output->forward(result.transpose(1, 2).reshape(
      {input.size(0), num_tokens, num_groups * size * head_dim(options)}));
}

std::string SelfAttentionImpl::options_text() const {
  check_dropout(options.dropout, "SelfAttention");
  std::string text =
      format("embed_dim {}, num_heads {}, num_key_value_heads {}, bias {}, is_causal {}",
             options.embed_dim, options.num_heads, options.num_key_value_heads, options.bias,
             options.is_causal);
  if (options.dropout) {
    text += format(", dropout p {}, layer {}, seed {}", options.dropout->p, options.dropout->layer,
                   options.dropout->stream->seed);
  }
  return text;
}

std::vector<PlanEntry> SelfAttentionImpl::plan(const TensorParallelPlanOptions& /*options*/) const {
  return {{.pattern = "qkv", .style = ParallelStyle::kColwise},
          {.pattern = "output", .style = ParallelStyle::kRowwise}};
}

at::Tensor SelfAttentionImpl::attend(const at::Tensor& query, const at::Tensor& key,
                                     const at::Tensor& value) const {
  AttentionOptions attention{.is_causal = options.is_causal};
  if (is_training()) attention.dropout = options.dropout;
  attention.first_head = output->first_divided_feature() / head_dim(options);
  attention.num_heads = options.num_heads;
  if (context() == nullptr) return plain_attention(query, key, value, attention);
  return context_parallel_attention(query, key, value, *context(), attention);
}

ParallelSelfAttentionImpl::ParallelSelfAttentionImpl(const SelfAttentionOptions& given,
                                                     const ProcessGroup& group,
                                                     const ParallelSelfAttentionOptions& parallel)
    : SelfAttentionImpl(given) {
  layers::parallelize_new(*qkv,
                          {.group = group,
                           .style = ParallelStyle::kColwise,
                           .sequence_parallel = parallel.sequence_parallel},
                          "ParallelSelfAttention.qkv");
  layers::parallelize_new(*output,
                          {.group = group,
                           .style = ParallelStyle::kRowwise,
                           .sequence_parallel = parallel.sequence_parallel},
                          "ParallelSelfAttention.output");
}

}  // namespace cadre
