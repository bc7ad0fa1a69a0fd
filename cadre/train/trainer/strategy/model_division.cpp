#include "cadre/train/trainer/strategy/model_division.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/tensor.h>

#include <utility>

#include "cadre/parallel/layers/vocab_parallel_cross_entropy.h"
#include "cadre/tensor/mesh/dtensor.h"

namespace cadre::train {
namespace {

// Merges the first two dimensions of the box; `size` is the size of the second one in the whole
// tensor. If the box has only a part of the second dimension, its rows are not contiguous after the
// merge, so several boxes are returned.
std::vector<Box> joined(const Box& box, int64_t size) {
  std::vector<Box> boxes;
  const bool is_one = box.sizes[1] == size;
  const int64_t count = is_one ? 1 : box.sizes[0];
  for (int64_t i = 0; i < count; ++i) {
    Box& next = boxes.emplace_back(box);
    next.offsets.erase(next.offsets.begin());
    next.sizes.erase(next.sizes.begin());
    next.offsets[0] += (box.offsets[0] + i) * size;
    if (is_one) next.sizes[0] *= box.sizes[0];
  }
  return boxes;
}

void join_first_dims(SnapshotTensor& tensor) {
  const int64_t size = tensor.sizes[1];
  tensor.sizes.erase(tensor.sizes.begin());
  tensor.sizes[0] *= 3;
  std::vector<Box> boxes;
  for (const Box& box : std::exchange(tensor.boxes, {})) {
    for (Box& part : joined(box, size)) boxes.push_back(std::move(part));
  }
  tensor.boxes = std::move(boxes);
}

}  // namespace

ModelDivision::ModelDivision(const Gpt& whole, const std::vector<std::shared_ptr<Gpt>>& parts,
                             const RunLayout& layout, const Config& config)
    : mesh_(*layout.mesh),
      num_tokens_(whole.context()),
      vocabulary_(whole.vocabulary()),
      pads_(config.parallel.sequence || config.parallel.context > 1),
      reduced_axes_(data_axis_names(config.parallel)) {
  const ParallelConfig& parallel = config.parallel;
  for (const auto& parameter : whole.named_parameters()) {
    num_dims_[parameter.key()] = parameter.value().dim();
  }
  if (parallel.context > 1) {
    context_.emplace(
        mesh_.group("cp"),
        ContextParallelOptions{
            .num_tokens = num_tokens_,
            .form = parallel.attention == "ring" ? ContextForm::kRing : ContextForm::kAllToAll});
    token_group_ = context_->group();
  }
  for (const auto& part : parts) {
    std::vector<PlanEntry> plan;  // empty if the matrices are not divided
    if (parallel.tensor > 1) {
      part->separate_heads();
      plan = part->plan(parallel.sequence);
    }
    const auto records = parallelize_module(*part, mesh_["tp"], plan);
    records_.insert(records_.end(), records.begin(), records.end());
    if (context_) set_context_parallel(*part, *context_);
  }
  if (config.model.experts > 0) {  // check_layout() guarantees a single part
    const std::vector<std::string> axes = token_axes(parallel);
    experts_.emplace(*parts[0], mesh_.slice(axes));
    records_ = experts_->parameter_shards();
    token_group_ = mesh_.joint_group(axes);
  }
}

at::Tensor ModelDivision::loss(const at::Tensor& logits, const at::Tensor& targets) const {
  return vocab_parallel_cross_entropy(logits, context_ ? context_->shard(targets, 1) : targets,
                                      mesh_.group("tp"),
                                      {.vocabulary = vocabulary_, .token_group = token_group_});
}

double ModelDivision::share_of_step(int64_t num_rows, int64_t num_samples) const {
  auto rows = static_cast<double>(num_rows);
  auto samples = static_cast<double>(num_samples);
  if (experts_) {
    const at::Tensor sums = at::tensor({rows, samples}, at::kDouble);
    token_group_->all_reduce(sums);
    rows = sums[0].item<double>();
    samples = sums[1].item<double>();
  }
  return rows / samples;
}

at::Tensor ModelDivision::padded(const at::Tensor& tokens) const {
  const int64_t missing = num_tokens_ - tokens.size(1);
  return pads_ && missing > 0 ? at::constant_pad_nd(tokens, {0, missing}) : tokens;
}

at::Tensor ModelDivision::whole_logits(const at::Tensor& logits, int64_t num_tokens) const {
  const at::Tensor own = logits.detach();
  at::Tensor whole =
      DTensor::from_local(own, mesh_["tp"], {Shard(2)}, {own.size(0), own.size(1), vocabulary_})
          .full_tensor({.requires_grad = false});
  if (context_) whole = context_->unshard(whole, 1);
  return whole.narrow(1, 0, num_tokens);
}

void ModelDivision::sum_gradients(const std::vector<at::Tensor>& parameters) const {
  if (context_) context_->sum_gradients(parameters);
}

void ModelDivision::sum_gradients(const std::vector<ParameterShard>& records) const {
  if (experts_) {
    experts_->sum_gradients(records, {.reduced_axes = reduced_axes_});
    return;
  }
  std::vector<at::Tensor> tensors;
  for (const ParameterShard& record : records) tensors.push_back(record.values);
  sum_gradients(tensors);
}

SnapshotParts ModelDivision::snapshot_parts(const std::vector<ParameterShard>& records) const {
  SnapshotParts parts = parts_of(records);
  for (SnapshotTensor& tensor : parts.parameters) {
    const auto plain_dims = static_cast<size_t>(num_dims_.at(tensor.name));
    if (tensor.sizes.size() > plain_dims) join_first_dims(tensor);
  }
  return parts;
}

}  // namespace cadre::train
