#include "cadre/parallel/layers/attention/head_exchange.h"

#include <ATen/ops/cat.h>

#include <numeric>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/attention/plain_attention.h"
#include "cadre/tensor/group/backward/differentiable.h"

namespace cadre {
namespace {

using Tensors = std::vector<at::Tensor>;

int64_t part_numel(const at::Tensor& part) {
  return part.size(0) * part.size(1) * part.size(3);
}

// Returns the heads ordered by the rank that will compute them: (ranks, elements of each rank).
at::Tensor by_rank(const at::Tensor& heads, int num_ranks) {
  return heads.unflatten(1, {num_ranks, heads.size(1) / num_ranks}).movedim(1, 0).flatten(1);
}

// Converts tensors (B, H, tokens of this rank, D) to (B, H / ranks, tokens of all ranks, D) by one
// all_to_all.
Tensors tokens_for_heads(const Tensors& tensors, const ContextParallel& context) {
  const ProcessGroup& group = context.group();
  const int num_ranks = group.world_size();
  Tensors by_ranks;
  int64_t numel_of_a_token = 0;  // the number of elements of one token that each rank gets
  for (const at::Tensor& tensor : tensors) {
    by_ranks.push_back(by_rank(tensor, num_ranks));
    numel_of_a_token += part_numel(tensor) / num_ranks;
  }
  AllToAllOptions splits;
  for (int rank = 0; rank < num_ranks; ++rank) {
    splits.input_split_sizes.push_back(numel_of_a_token * context.num_own_tokens());
    splits.output_split_sizes.push_back(numel_of_a_token * context.num_tokens_of(rank));
  }
  const at::Tensor received = functional::all_to_all(at::cat(by_ranks, 1).flatten(), group, splits);
  std::vector<Tensors> parts(tensors.size());
  int64_t begin = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const int64_t num_tokens = context.num_tokens_of(rank);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const int64_t numel = part_numel(tensors[i]) / num_ranks * num_tokens;
      parts[i].push_back(received.narrow(0, begin, numel)
                             .view({tensors[i].size(0), tensors[i].size(1) / num_ranks, num_tokens,
                                    tensors[i].size(3)}));
      begin += numel;
    }
  }
  Tensors results;
  for (const Tensors& of_ranks : parts) {
    results.push_back(context.in_sequence_order(at::cat(of_ranks, 2), 2));
  }
  return results;
}

// The inverse of tokens_for_heads(), for one tensor.
at::Tensor heads_for_tokens(const at::Tensor& tensor, const ContextParallel& context) {
  const int num_ranks = context.group().world_size();
  const at::Tensor ordered = context.in_rank_order(tensor, 2);
  const int64_t num_own_tokens = context.num_own_tokens();
  Tensors sent;
  AllToAllOptions splits;
  int64_t first_token = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const int64_t num_tokens = context.num_tokens_of(rank);
    sent.push_back(ordered.narrow(2, first_token, num_tokens).flatten());
    splits.input_split_sizes.push_back(sent.back().numel());
    splits.output_split_sizes.push_back(part_numel(tensor) * num_own_tokens);
    first_token += num_tokens;
  }
  return functional::all_to_all(at::cat(sent), context.group(), splits)
      .view({num_ranks, tensor.size(0), tensor.size(1), num_own_tokens, tensor.size(3)})
      .movedim(0, 1)
      .flatten(1, 2);
}

}  // namespace

at::Tensor attention_by_heads(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const ContextParallel& context,
                              const AttentionOptions& options) {
  const ProcessGroup& group = context.group();
  const int64_t num_ranks = group.world_size();
  if (query.size(1) % num_ranks != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                format("context_parallel_attention on rank {} of group \"{}\": kAllToAll gives "
                       "each of {} ranks the same number of query heads, so the number of ranks "
                       "must divide the {} heads; use ContextForm::kRing, which takes any number",
                       group.rank(), group.name(), num_ranks, query.size(1)));
  }
  const int64_t num_repeats = std::lcm(key.size(1), num_ranks) / key.size(1);
  const auto repeated = [&](const at::Tensor& heads) {
    return num_repeats == 1 ? heads : heads.repeat_interleave(num_repeats, 1);
  };
  const Tensors whole = tokens_for_heads({query, repeated(key), repeated(value)}, context);
  AttentionOptions of_heads = options;
  if (of_heads.num_heads == 0) of_heads.num_heads = query.size(1);
  of_heads.first_head += group.rank() * (query.size(1) / num_ranks);
  return heads_for_tokens(plain_attention(whole[0], whole[1], whole[2], of_heads), context);
}

}  // namespace cadre
