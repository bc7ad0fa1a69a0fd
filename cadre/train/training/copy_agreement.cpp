#include "cadre/train/training/copy_agreement.h"

#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>

#include <bit>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/step_agreement.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/optim/optimizer_options.h"

namespace cadre::training_parts {
namespace {

constexpr const char* kStep = "cadre::Training::step()";
constexpr int64_t kNumFirstSteps = 4;   // parameters are compared in each of them
constexpr int64_t kComparedEvery = 16;  // steps
constexpr double kTolerance = 1e-4;     // relative to the largest element

// Returns whether each rank along the axis "tp" has the whole parameter.
bool is_replicated(const ParameterShard& record) {
  const std::vector<MeshAxis>& axes = record.mesh.axes();
  for (size_t i = 0; i < axes.size(); ++i) {
    if (axes[i].name == "tp" && !record.placements[i].is_replicate()) return false;
  }
  return true;
}

// Returns a hash of one element of each tensor; another one in each step.
uint64_t sample_of(const std::vector<NamedTensor>& tensors, int64_t step) {
  Fnv1a hash;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor values = tensors[i].tensor.detach().flatten();
    if (values.numel() == 0) continue;
    const int64_t index = (step * 7919 + static_cast<int64_t>(i) * 104729) % values.numel();
    hash.add(std::bit_cast<uint64_t>(values[index].item<double>()));
  }
  return hash.value();
}

}  // namespace

CopyAgreement::CopyAgreement(const TrainingDivision& division,
                             const std::vector<ParameterShard>& records)
    : world_(division.world()), copy_(division.copy()) {
  // Shards of parameters that are whole along "tp" may be cut at different elements on its ranks.
  if (!division.tensor() || has_units(division.strategy())) return;
  layers_ = division.tensor()->group("tp");
  for (const ParameterShard& record : records) {
    if (is_replicated(record)) replicated_.push_back({record.name, record.values});
  }
}

void CopyAgreement::set_names(const std::vector<NamedTensor>& parameters) {
  for (const NamedTensor& parameter : parameters) {
    names_[parameter.tensor.unsafeGetTensorImpl()] = parameter.name;
  }
}

// The optimizer may have tensors of its own, such as those of a ZeroRedundancyOptimizer.
void CopyAgreement::add_names_of(const torch::optim::Optimizer& optimizer) {
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    const std::vector<at::Tensor>& parameters = optimizer.param_groups()[group].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto [name, is_new] =
          names_.try_emplace(parameters[i].unsafeGetTensorImpl(), std::string());
      if (is_new) name->second = format("parameter {} of group {}", i, group);
    }
  }
}

void CopyAgreement::agree_on_step(const torch::optim::Optimizer& optimizer) {
  if (!copy_) return;
  ++num_steps_;
  add_names_of(optimizer);
  const optim_state::GroupTerms groups{.groups = optimizer.param_groups(),
                                       .defaults = nullptr,
                                       .name_of = [this](const at::Tensor& parameter) {
                                         return names_.at(parameter.unsafeGetTensorImpl());
                                       }};
  const auto digest = [&] {
    Fnv1a hash;
    hash.add(static_cast<uint64_t>(num_steps_));
    hash.add(optim_state::digest_of(groups));
    return hash.value();
  };
  const auto fields = [&] {
    std::vector<AgreedField> made = {{"the step", format("{}", num_steps_)}};
    optim_state::add_fields_of(groups, made);
    return made;
  };
  shard::agree_on_step(
      wrap::LocatedGroup(*copy_),
      {.subject = kStep,
       .check = [] {},
       .digest = digest,
       .fields = fields,
       .remedy = "the ranks of a copy of the model make the same steps with the same options"});
  if (num_steps_ <= kNumFirstSteps || num_steps_ % kComparedEvery == 0) compare_replicated();
}

void CopyAgreement::compare_replicated() const {
  if (!layers_ || replicated_.empty()) return;
  const at::NoGradGuard no_grad;
  const auto samples = gather_words(*layers_, kStep, 1, [&]() -> std::vector<int64_t> {
    return {std::bit_cast<int64_t>(sample_of(replicated_, num_steps_))};
  });
  bool are_equal = true;
  for (const std::vector<int64_t>& words : samples) are_equal = are_equal && words == samples[0];
  if (are_equal) return;
  std::string different;
  for (const NamedTensor& parameter : replicated_) {
    const at::Tensor first = parameter.tensor.detach().clone();
    layers_->broadcast(first, {.root = 0});
    if (first.numel() == 0 || !different.empty()) continue;
    const double largest = first.abs().max().item<double>();
    const double difference = (parameter.tensor.detach() - first).abs().max().item<double>();
    if (!(difference <= kTolerance * largest)) different = parameter.name;
  }
  check_on_all_ranks(*layers_, kStep, [&] {
    if (different.empty()) return;
    throw Error(
        ErrorCode::kInvalidArgument,
        format(
            "{}: the parameter \"{}\", which every rank of a copy has whole, differs from that "
            "of rank 0: a layer drew random numbers of each rank (instead of dropout of libtorch "
            "use cadre::CounterBasedDropout), or the ranks had different targets",
            kStep, different));
  });
}

void CopyAgreement::agree_on_microbatches(int64_t num_rows, int64_t num_parts) const {
  check_on_all_ranks(world_, kStep, [&] {
    if (num_rows >= num_parts) return;
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: this rank has {} rows of the batch, and options.num_parts is {}: a "
                       "pipeline needs a row for each microbatch; leave out a short batch "
                       "(.drop_last = true), or choose fewer parts",
                       kStep, num_rows, num_parts));
  });
}

}  // namespace cadre::training_parts
