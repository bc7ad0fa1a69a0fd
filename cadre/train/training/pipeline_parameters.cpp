#include "cadre/train/training/pipeline_parameters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

namespace cadre::training_parts {

// If two stages of this rank share a tied weight, the pipeline lists it twice.
PipelineParameters::PipelineParameters(const Pipeline& pipeline) {
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
  for (const ParameterShard& record : records_) {
    if (record.values.numel() == 0) record.values.mutable_grad() = at::empty_like(record.values);
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
