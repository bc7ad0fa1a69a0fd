#include "cadre/parallel/layers/attention/context_parallel_attention.h"

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/attention/head_exchange.h"
#include "cadre/parallel/layers/attention/plain_attention.h"
#include "cadre/parallel/layers/attention/ring_attention.h"

namespace cadre {
namespace {

bool fit_each_other(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  return query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && key.size(0) == query.size(0) &&
         value.size(0) == query.size(0) && value.size(1) == key.size(1) && key.size(1) > 0 &&
         query.size(1) % key.size(1) == 0 && key.size(3) == query.size(3) &&
         at::isFloatingType(query.scalar_type()) && key.scalar_type() == query.scalar_type() &&
         value.scalar_type() == query.scalar_type();
}

void check(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
           const ContextParallel& context, const AttentionOptions& options) {
  const ProcessGroup& group = context.group();
  const auto refuse = [&](const std::string& problem) {
    throw Error(ErrorCode::kInvalidArgument,
                format("context_parallel_attention on rank {} of group \"{}\": {}", group.rank(),
                       group.name(), problem));
  };
  if (!fit_each_other(query, key, value)) {
    refuse(
        format("the query {} {}, key {} {} and value {} {} are not (B, H, T, D), (B, H_kv, T, "
               "D) and (B, H_kv, T, D_v) of one floating-point dtype with H a multiple of H_kv",
               c10::toString(query.scalar_type()), list_of(query.sizes()),
               c10::toString(key.scalar_type()), list_of(key.sizes()),
               c10::toString(value.scalar_type()), list_of(value.sizes())));
  }
  check_dropout(options.dropout, "context_parallel_attention");
  const int64_t expected = context.num_own_tokens();
  if (query.size(2) == expected && key.size(2) == expected && value.size(2) == expected) return;
  refuse(
      format("the query {}, key {} and value {} do not have this rank's {} of {} tokens in "
             "dimension 2; divide the model's input with ContextParallel::shard()",
             list_of(query.sizes()), list_of(key.sizes()), list_of(value.sizes()), expected,
             context.options().num_tokens));
}

}  // namespace

at::Tensor context_parallel_attention(const at::Tensor& query, const at::Tensor& key,
                                      const at::Tensor& value, const ContextParallel& context,
                                      const AttentionOptions& options) {
  check(query, key, value, context, options);
  if (context.group().world_size() == 1) return plain_attention(query, key, value, options);
  return context.options().form == ContextForm::kRing
             ? ring_attention(query, key, value, context, options)
             : attention_by_heads(query, key, value, context, options);
}

}  // namespace cadre
