#include "cadre/parallel/layers/context_parallel.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/joint_loss.h"
#include "cadre/parallel/layers/token_mixing.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/backward/differentiable.h"
#include "cadre/tensor/group/messages/private_messages.h"
#include "cadre/tensor/mesh/layout.h"

namespace cadre {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 40;

[[noreturn]] void refuse(const ProcessGroup& group, const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument,
              format("ContextParallel on rank {} of {} of group \"{}\": {}", group.rank(),
                     group.world_size(), group.name(), problem));
}

void check_tokens(const ContextParallel& context, const at::Tensor& tensor, int64_t dim,
                  int64_t expected) {
  if (dim >= -tensor.dim() && dim < tensor.dim() && tensor.size(dim) == expected) return;
  refuse(context.group(),
         format("expected {} tokens in dimension {} of a tensor of the sizes {}; the sequence has "
                "{} tokens, of which this rank has {}",
                expected, dim, list_of(tensor.sizes()), context.options().num_tokens,
                context.num_own_tokens()));
}

}  // namespace

std::string_view to_string(ContextForm form) {
  return form == ContextForm::kRing ? "kRing" : "kAllToAll";
}

std::string_view to_string(SequenceOrder order) {
  return order == SequenceOrder::kContiguous ? "kContiguous" : "kZigzag";
}

ContextParallel::ContextParallel(const Ranks& ranks, const ContextParallelOptions& options)
    : group_(ranks.group_of_one_axis("ContextParallel", "cp")), options_(options) {
  const ProcessGroup& group = group_;
  check_equal_on_all_ranks(
      group, "ContextParallel",
      [&]() -> std::vector<AgreedField> {
        if (options.num_tokens < 1 || options.num_tokens > kMaxTokens) {
          refuse(group, format("num_tokens is {}, expected at least 1 and at most {}",
                               options.num_tokens, kMaxTokens));
        }
        return {{"num_tokens", format("{}", options.num_tokens)},
                {"form", std::string(to_string(options.form))},
                {"order", std::string(to_string(options.order))}};
      },
      "pass the same options on all ranks");
  if (options.form == ContextForm::kRing && group.world_size() > 1) {
    messages_ = std::make_shared<const PrivateMessages>(group, "cadre::ContextParallel");
  }
}

std::vector<TokenRun> ContextParallel::runs(int rank) const {
  const int num_ranks = group_.world_size();
  const int index = rank;
  std::vector<TokenRun> runs;
  const auto add = [&](int num_chunks, int chunk_index) {
    const Chunk chunk = chunk_of(options_.num_tokens, num_chunks, chunk_index);
    if (chunk.size > 0) runs.push_back({.begin = chunk.begin, .size = chunk.size});
  };
  if (options_.order == SequenceOrder::kContiguous) {
    add(num_ranks, index);
  } else {
    add(2 * num_ranks, index);
    add(2 * num_ranks, 2 * num_ranks - 1 - index);
  }
  return runs;
}

int64_t ContextParallel::num_tokens_of(int rank) const {
  int64_t num_tokens = 0;
  for (const TokenRun& run : runs(rank)) num_tokens += run.size;
  return num_tokens;
}

at::Tensor ContextParallel::positions(c10::Device device) const {
  return shard(at::arange(options_.num_tokens, at::TensorOptions(at::kLong).device(device)), 0);
}

at::Tensor ContextParallel::shard(const at::Tensor& whole, int64_t dim) const {
  check_tokens(*this, whole, dim, options_.num_tokens);
  std::vector<at::Tensor> parts;
  for (const TokenRun& run : runs(group_.rank())) {
    parts.push_back(whole.narrow(dim, run.begin, run.size));
  }
  return parts.empty() ? whole.narrow(dim, 0, 0) : at::cat(parts, dim);
}

at::Tensor ContextParallel::unshard(const at::Tensor& shard, int64_t dim) const {
  check_tokens(*this, shard, dim, num_own_tokens());
  int64_t longest = 0;
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    longest = std::max(longest, num_tokens_of(rank));
  }
  // Shape (tokens, ...). Ranks with fewer tokens append zeros, so that all ranks send the same
  // number of rows.
  at::Tensor rows = shard.movedim(dim, 0);
  std::vector<int64_t> padding(static_cast<size_t>(2 * rows.dim()), 0);
  padding.back() = longest - rows.size(0);
  rows = functional::all_gather(at::constant_pad_nd(rows, padding), group_);
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    parts.push_back(rows.narrow(0, rank * longest, num_tokens_of(rank)));
  }
  return in_sequence_order(at::cat(parts), 0).movedim(0, dim);
}

at::Tensor ContextParallel::in_rank_order(const at::Tensor& whole, int64_t dim) const {
  check_tokens(*this, whole, dim, options_.num_tokens);
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    for (const TokenRun& run : runs(rank)) parts.push_back(whole.narrow(dim, run.begin, run.size));
  }
  return at::cat(parts, dim);
}

at::Tensor ContextParallel::in_sequence_order(const at::Tensor& ranks, int64_t dim) const {
  check_tokens(*this, ranks, dim, options_.num_tokens);
  struct Part {
    TokenRun run;
    int64_t begin;  // the index of the run's first token, counted over the tokens of all ranks
  };
  std::vector<Part> parts;
  int64_t begin = 0;
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    for (const TokenRun& run : runs(rank)) {
      parts.push_back({run, begin});
      begin += run.size;
    }
  }
  std::ranges::sort(parts, {}, [](const Part& part) { return part.run.begin; });
  std::vector<at::Tensor> tensors;
  for (const Part& part : parts) tensors.push_back(ranks.narrow(dim, part.begin, part.run.size));
  return at::cat(tensors, dim);
}

at::Tensor ContextParallel::mean_over_tokens(const at::Tensor& sum, int64_t count) const {
  return cadre::mean_over_tokens(sum, count, group_, "ContextParallel");
}

void ContextParallel::sum_gradients(const std::vector<at::Tensor>& parameters) const {
  cadre::sum_gradients(parameters, group_, "ContextParallel");
}

void set_context_parallel(torch::nn::Module& module, const ContextParallel& context) {
  std::vector<ContextParallelLayer*> layers;
  const auto make_fields = [&] {
    std::vector<AgreedField> fields;
    const auto visit = [&](const std::string& name, torch::nn::Module& each) {
      if (const auto problem = layers::token_mixing_of(each)) {
        refuse(
            context.group(),
            format("set_context_parallel: \"{}\", a {}, {}, and would have only this rank's "
                   "tokens; use SelfAttention of Cadre, context_parallel_attention() or a layer "
                   "that works on single tokens, or call set_context_parallel() for the parts of "
                   "the module that get divided sequences",
                   name, each.name(), *problem));
      }
      auto* const layer = dynamic_cast<ContextParallelLayer*>(&each);
      if (layer == nullptr) return;
      layers.push_back(layer);
      fields.push_back({format("the layer \"{}\"", name), layer->options_text()});
    };
    visit("", module);
    for (const auto& child : module.named_modules("", /*include_self=*/false)) {
      visit(child.key(), *child.value());
    }
    if (!layers.empty()) return fields;
    refuse(
        context.group(),
        format("set_context_parallel: the module \"{}\" has no SelfAttention or "
               "CounterBasedDropout of Cadre, so nothing in it would attend to the tokens of other "
               "ranks; call context_parallel_attention() in an attention of your own",
               module.name()));
  };
  check_equal_on_all_ranks(context.group(), "set_context_parallel", make_fields,
                           "pass the same module with the same options on all ranks");
  for (ContextParallelLayer* const layer : layers) layer->set_context_parallel(context);
}

}  // namespace cadre
