#include "cadre/train/training/pipeline_parameters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cadre/tensor/group/agreement.h"

namespace cadre::training_parts {

// If two stages of this rank share a tied weight, the pipeline lists it twice.
PipelineParameters::PipelineParameters(const Pipeline& pipeline, const ProcessGroup& world)
    : world_(world) {
  for (ParameterShard& record : pipeline.parameter_shards()) {
    const auto first = std::ranges::find(records_, record.name, &ParameterShard::name);
    if (first == records_.end()) {
      records_.push_back(std::move(record));
    } else {
      copies_.emplace_back(*first, std::move(record));
    }
  }
  fill_copies();
}

void PipelineParameters::prepare_step() const {
  constexpr size_t kBits = 63;
  const auto num_words = static_cast<int64_t>(records_.size() / kBits + 1);
  const auto words = gather_words(world_, "cadre::Training::step()", num_words, [&] {
    std::vector<int64_t> has_gradient(static_cast<size_t>(num_words));
    for (size_t i = 0; i < records_.size(); ++i) {
      const at::Tensor& values = records_[i].values;
      if (values.numel() == 0 || !values.grad().defined()) continue;
      has_gradient[i / kBits] |= int64_t{1} << (i % kBits);
    }
    return has_gradient;
  });
  for (size_t i = 0; i < records_.size(); ++i) {
    const at::Tensor& values = records_[i].values;
    if (values.numel() != 0) continue;
    values.mutable_grad().reset();
    const bool is_trained = std::ranges::any_of(words, [i](const std::vector<int64_t>& of_rank) {
      return (of_rank[i / kBits] >> (i % kBits) & 1) != 0;
    });
    if (is_trained) values.mutable_grad() = at::empty_like(values);
  }
}

void PipelineParameters::fill_copies() const {
  const at::NoGradGuard no_grad;
  for (const auto& [first, copy] : copies_) {
    if (copy.range.size() == 0) continue;
    copy.values.copy_(first.values);
    copy.values.mutable_grad().reset();
  }
}

void PipelineParameters::zero_grad() const {
  for (const ParameterShard& record : records_) record.values.mutable_grad().reset();
}

}  // namespace cadre::training_parts
