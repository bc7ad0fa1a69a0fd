#include "cadre/parallel/layers/activation_parts.h"

#include <ATen/ops/constant_pad_nd.h>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/backward/differentiable.h"
#include "cadre/tensor/mesh/layout.h"

namespace cadre {
namespace {

// Appends zeros after the last feature, so that every rank has a chunk of the full size. By the
// rule of Shard only the last chunks are shorter, so the gathered chunks are the whole tensor
// followed by zeros.
at::Tensor padded_to(const at::Tensor& input, int64_t features) {
  const int64_t missing = features - input.size(-1);
  return missing == 0 ? input : at::constant_pad_nd(input, {0, missing});
}

at::Tensor first_features(const at::Tensor& input, int64_t features) {
  return input.size(-1) == features ? input : input.narrow(-1, 0, features);
}

}  // namespace

at::Tensor parts_first(const at::Tensor& input, const ProcessGroup& group) {
  const int64_t num_ranks = group.world_size();
  if (input.dim() < 2 || input.size(-2) % num_ranks != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        format("sequence parallelism on rank {} of group \"{}\": the sequence is dimension -2 of "
               "(..., T, D), and {} ranks do not divide T of the sizes {}; pad the sequence",
               group.rank(), group.name(), num_ranks, list_of(input.sizes())));
  }
  return input.unflatten(-2, {num_ranks, input.size(-2) / num_ranks}).movedim(-3, 0).contiguous();
}

at::Tensor parts_in_place(const at::Tensor& parts) {
  return parts.movedim(0, -3).flatten(-3, -2);
}

at::Tensor gather_sequence(const at::Tensor& input, const ProcessGroup& group) {
  return parts_in_place(functional::all_gather(input.unsqueeze(0), group));
}

at::Tensor reduce_scatter_sequence(const at::Tensor& input, const ProcessGroup& group) {
  return functional::reduce_scatter(parts_first(input, group), group).squeeze(0);
}

at::Tensor scatter_features(const at::Tensor& input, const ProcessGroup& group) {
  const int64_t features = input.size(-1);
  const int num_ranks = group.world_size();
  const at::Tensor even = padded_to(input, full_chunk(features, num_ranks) * num_ranks);
  return first_features(functional::scatter_to_group(even, group),
                        chunk_of(features, num_ranks, group.rank()).size);
}

at::Tensor gather_features(const at::Tensor& input, const ProcessGroup& group, int64_t features) {
  const at::Tensor even = padded_to(input, full_chunk(features, group.world_size()));
  return first_features(functional::gather_from_group(even, group), features);
}

}  // namespace cadre
