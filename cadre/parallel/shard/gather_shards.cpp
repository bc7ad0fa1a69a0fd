#include "cadre/parallel/shard/gather_shards.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <optional>

#include "cadre/parallel/shard/division/boxes.h"
#include "cadre/parallel/shard/division/parameter_division.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/shard_fence.h"
#include "cadre/tensor/group/agreement.h"

namespace cadre::shard {
namespace {

bool has_memory_of(const at::Tensor& values, const at::Tensor& other) {
  return values.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         values.storage_offset() == other.storage_offset() && values.sizes() == other.sizes() &&
         values.strides() == other.strides() && values.scalar_type() == other.scalar_type();
}

}  // namespace

at::Tensor gather_whole(const ParameterShard& shard, const at::Tensor& part) {
  const at::NoGradGuard no_grad;
  at::Tensor whole = at::zeros(shard.sizes, part.options().requires_grad(false));
  const at::Tensor elements = part.reshape(-1);
  int64_t begin = 0;
  for (const Box& box : boxes_of(shard)) {
    at::Tensor region = whole;
    for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
      region = region.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
    }
    region.copy_(elements.narrow(0, begin, box.numel()).view(box.sizes));
    begin += box.numel();
  }
  // Each element has only zero bits on all ranks except its owners, which have equal bits: a tied
  // weight has several. So a bitwise OR gives the owner's bits, and so does a maximum of the bytes,
  // which the engines of devices have.
  const at::Tensor bits = whole.view(-1).view(at::kByte);
  const ReduceOp op = bits.is_cpu() ? ReduceOp::kBor : ReduceOp::kMax;
  for (const ProcessGroup& group : dividing_groups({&shard, 1})) group.all_reduce(bits, {.op = op});
  return whole;
}

std::vector<NamedTensor> gather_values(std::span<const ParameterShard> shards) {
  std::vector<NamedTensor> values;
  for (const ParameterShard& shard : shards) {
    values.push_back({shard.name, gather_whole(shard, shard.values)});
  }
  return values;
}

std::vector<NamedTensor> gather_gradients(std::span<const ParameterShard> shards,
                                          const ProcessGroup& world) {
  check_gradients_reduced("cadre::shard::gather_gradients", shards);
  const at::Tensor is_defined = at::zeros({static_cast<int64_t>(shards.size())}, at::kInt);
  for (size_t i = 0; i < shards.size(); ++i) {
    is_defined.mutable_data_ptr<int>()[i] = shards[i].values.grad().defined() ? 1 : 0;
  }
  world.all_reduce(is_defined, {.op = ReduceOp::kMax});
  std::vector<NamedTensor> gradients;
  for (size_t i = 0; i < shards.size(); ++i) {
    const ParameterShard& shard = shards[i];
    NamedTensor& gradient = gradients.emplace_back(NamedTensor{shard.name, {}});
    if (is_defined.const_data_ptr<int>()[i] == 0) continue;
    const at::Tensor& own = shard.values.grad();
    gradient.tensor = gather_whole(shard, own.defined() ? own : at::zeros_like(shard.values));
  }
  return gradients;
}

void check_gradients_reduced(const char* call, std::span<const ParameterShard> shards) {
  std::vector<ProcessGroup> groups;
  const auto add = [&groups](const ProcessGroup& group) {
    const bool is_known = std::ranges::any_of(groups, [&](const ProcessGroup& known) {
      return &known.communicator() == &group.communicator();
    });
    if (!is_known && group.world_size() > 1) groups.push_back(group);
  };
  bool is_watched = false;
  for (const ParameterShard& shard : shards) {
    const auto& flat = FlatParameters::of(shard.memory);
    if (!flat || !flat->fence()->has_gradient_check()) continue;
    is_watched = true;
    if (const ProcessGroup* const ranks = flat->fence()->stepping_ranks()) add(*ranks);
  }
  if (!is_watched) return;
  for (const ProcessGroup& group : dividing_groups(shards)) add(group);
  const auto problem = common_refusal(groups, call, [shards] {
    for (const ParameterShard& shard : shards) {
      const auto& flat = FlatParameters::of(shard.memory);
      if (flat) flat->fence()->check_gradient(shard.values);
    }
  });
  if (problem) throw *problem;
}

at::Tensor whole_values(const at::Tensor& parameter) {
  return parameter.is_contiguous() ? parameter.detach().view({-1}) : parameter.detach();
}

void follow_memory(std::span<const ParameterShard> shards) {
  for (const ParameterShard& shard : shards) {
    if (shard.memory) continue;
    const at::Tensor current = whole_values(shard.parameter);
    if (!has_memory_of(shard.values, current)) shard.values.set_data(current);
  }
}

}  // namespace cadre::shard
