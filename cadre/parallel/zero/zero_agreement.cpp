// Implements the checks that the ranks of a ZeroRedundancyOptimizer make, and the settings that
// they compare, in the constructor and before each step.
#include <ATen/ops/empty.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/division/parameter_division.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/shard_fence.h"
#include "cadre/parallel/shard/shardable.h"
#include "cadre/parallel/shard/step_agreement.h"
#include "cadre/parallel/zero/zero_core.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/hooks/device_check.h"
#include "cadre/tensor/hooks/replica_check.h"
#include "cadre/tensor/hooks/tensor_version.h"
#include "cadre/tensor/optim/optimizer_options.h"

namespace cadre::parallel {
namespace {

constexpr const char* kZeroCall = "cadre::ZeroRedundancyOptimizer";
constexpr std::string_view kEqualGroups =
    "give all ranks the same parameter groups in the same order, with the same options, and load "
    "the "
    "same state on all of them";
constexpr std::string_view kInConstruction = "its construction";
constexpr std::string_view kInStep = "its step {}";

// Adds to the digest whether the parameter has a gradient, and, of one on the CPU, up to 16 of its
// elements at equal distances, including the first and the last one.
void add_gradient_sample(Fnv1a& digest, const at::Tensor& parameter) {
  constexpr int64_t kNumSamples = 16;
  at::Tensor gradient = parameter.grad();
  digest.add(gradient.defined() ? 1 : 0);
  if (!gradient.defined() || gradient.layout() != at::kStrided || gradient.numel() == 0) return;
  if (!gradient.is_cpu()) return;  // the host would have to wait for the device
  if (!gradient.is_non_overlapping_and_dense()) gradient = gradient.contiguous();
  const auto element = static_cast<int64_t>(gradient.element_size());
  const auto* const bytes = static_cast<const char*>(gradient.const_data_ptr());
  const int64_t last = gradient.numel() - 1;
  const int64_t count = std::min(kNumSamples, gradient.numel());
  for (int64_t k = 0; k < count; ++k) {
    const int64_t index = count == 1 ? 0 : last * k / (count - 1);
    digest.add(std::string_view(bytes + index * element, static_cast<size_t>(element)));
  }
}

}  // namespace

void ZeroCore::start(const Settings& settings) {
  group_.enter({kInConstruction, 0});
  const bool is_whole = stage_ == ZeroStage::kReplicatedGradients;
  if (is_whole) wrap::check_replicas_match("ZeroRedundancyOptimizer", {named_, {}}, group_);
  const auto make_fields = [&] {
    wrap::refuse_inference_mode(kZeroCall);
    wrap::refuse_inference_tensors(kZeroCall, named_);
    if (is_whole) check_named();
    return fields_of(settings.groups, settings.defaults);
  };
  check_equal_on_all_ranks(group_.process_group(), kZeroCall, make_fields, kEqualGroups);
  warn_of_uncompared(settings.groups, settings.defaults);
  if (!is_whole) return;
  wrap::broadcast_tensors(named_, /*root=*/0, group_);
  mesh_ = shard::mesh_of_wrapper(group_.process_group(), "shard", named_);
  for (const torch::optim::OptimizerParamGroup& group : settings.groups) adopt(group.params());
}

void ZeroCore::add_group(const torch::optim::OptimizerParamGroup& group,
                         const torch::optim::OptimizerOptions& defaults) {
  const auto make_fields = [&] {
    check_fresh(group.params());
    return fields_of({group}, &defaults);
  };
  check_equal_on_all_ranks(group_.process_group(), kZeroCall, make_fields, kEqualGroups);
  adopt(group.params());
}

void ZeroCore::check_named() const {
  if (const auto problem = wrap::beyond_reach(group_.process_group().device(), named_))
    refuse(*problem);
  if (const auto problem = wrap::not_on_one_device(named_)) refuse(*problem);
  for (const NamedTensor& parameter : named_) {
    // Throws if the parameter was divided without a mesh.
    static_cast<void>(shard::division_of(parameter));
    if (parameter.tensor.is_meta()) {
      refuse(
          format("the parameter \"{}\" is on the meta device and has no values; call "
                 "cadre::materialize(module) before, on all ranks",
                 parameter.name));
    }
    if (parameter.tensor.is_contiguous()) continue;
    refuse(format(
        "the parameter \"{}\" is not contiguous, but parameters in a flat buffer must be; call "
        "parameter.set_data(parameter.contiguous()) before you pass it to a wrapper",
        parameter.name));
  }
  std::vector<at::Tensor> trained;
  for (const NamedTensor& parameter : named_) {
    if (parameter.tensor.requires_grad()) trained.push_back(parameter.tensor);
  }
  check_fresh(trained);
}

// Throws if new trained parameters among `parameters` cannot be moved into flat buffers, for
// example because they share memory with a tensor that is not moved.
void ZeroCore::check_fresh(std::span<const at::Tensor> parameters) const {
  if (stage_ == ZeroStage::kShardedGradients) return;
  std::vector<bool> is_moved(named_.size(), false);
  for (const at::Tensor& parameter : parameters) {
    const size_t index = index_of(parameter);
    is_moved[index] = parameter.requires_grad() && !leaves_.contains(key_of(parameter));
  }
  // Most steps end the check here, because they have no new parameters.
  if (std::ranges::find(is_moved, true) == is_moved.end()) return;
  std::vector<NamedTensor> moved;
  std::vector<NamedTensor> kept;
  for (size_t i = 0; i < named_.size(); ++i) {
    if (leaves_.contains(key_of(named_[i].tensor))) continue;
    (is_moved[i] ? moved : kept).push_back(named_[i]);
  }
  const std::string what =
      format("ZeroRedundancyOptimizer of {}, {}", optimizer_, group_.rank_text());
  for (const NamedTensor& parameter : moved) {
    const at::ScalarType dtype = parameter.tensor.scalar_type();
    shard::check_shardable(what, {parameter}, {.shard = dtype, .compute = dtype});
  }
  shard::check_apart(what, moved, kept);
  shard::warn_of_other_holders(group_.log_sink(), "zero", moved, kept);
}

size_t ZeroCore::index_of(const at::Tensor& parameter) const {
  const auto found = indices_.find(key_of(parameter));
  if (found != indices_.end()) return found->second;
  refuse(
      format("a parameter of sizes {} in a parameter group is none of the {} parameters that the "
             "optimizer was made for; pass groups with parameters of the same model",
             list_of(parameter.sizes()), std::max(named_.size(), shards_.size())));
}

optim_state::GroupTerms ZeroCore::terms_of(const Groups& groups,
                                           const torch::optim::OptimizerOptions* defaults,
                                           const StateMarkOf& state_mark_of) const {
  return {.groups = groups,
          .defaults = defaults,
          .name_of =
              [this](const at::Tensor& parameter) {
                const size_t index = index_of(parameter);
                return stage_ == ZeroStage::kReplicatedGradients ? named_[index].name
                                                                 : shards_[index].name;
              },
          .state_mark_of = state_mark_of};
}

std::vector<AgreedField> ZeroCore::fields_of(const Groups& groups,
                                             const torch::optim::OptimizerOptions* defaults,
                                             const StateMarkOf& state_mark_of) const {
  std::vector<AgreedField> fields = {{"stage", format("{}", static_cast<int>(stage_))},
                                     {"bucket_cap_bytes", format("{}", options_.bucket_cap_bytes)},
                                     {"wait_in_step", !options_.wait_in_step   ? "unset"
                                                      : *options_.wait_in_step ? "true"
                                                                               : "false"}};
  add_fields_of(terms_of(groups, defaults, state_mark_of), fields);
  return fields;
}

void ZeroCore::check_on_all(const std::function<void()>& check) const {
  check_on_all_ranks(group_.process_group(), kZeroCall, check);
}

void ZeroCore::check_frozen() const {
  for (const at::Tensor& parameter : frozen_) {
    if (!parameter.grad().defined() || leaves_.contains(key_of(parameter))) continue;
    refuse(
        format("a parameter of sizes {} was frozen when the optimizer was made and has a gradient "
               "now; unfreeze parameters before the optimizer is made",
               list_of(parameter.sizes())));
  }
}

// Called in stage 2. Throws if a parameter of the groups has a gradient on this rank that is not
// reduced yet.
void ZeroCore::check_gradients(const Groups& groups) const {
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      const ParameterShard& shard = shards_[index_of(parameter)];
      const auto& flat = shard::FlatParameters::of(shard.memory);
      if (flat) flat->fence()->check_gradient(shard.values);
    }
  }
}

void ZeroCore::check_step(const Groups& groups) const {
  for (const auto& flat : buckets_) flat->check_in_place();
  if (stage_ == ZeroStage::kShardedGradients) return check_gradients(groups);
  check_frozen();
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    check_fresh(group.params());
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined() || parameter.grad().layout() == at::kStrided) continue;
      refuse(
          format("the gradient of \"{}\" is not dense; make it dense, for example by an embedding "
                 "with sparse(false)",
                 named_[index_of(parameter)].name));
    }
  }
}

void ZeroCore::agree_on_step(const Groups& groups, const StateMarkOf& state_mark_of) {
  group_.enter({kInStep, ++num_steps_});
  StateMarkOf mark_of;
  if (state_mark_of) {
    mark_of = [&](const at::Tensor& parameter) { return state_mark_of(leaf_of(parameter)); };
  }
  samples_are_equal_ = shard::agree_on_step(
      group_, {.subject = kZeroCall,
               .check = [&] { check_step(groups); },
               .digest = [&] { return digest_of(terms_of(groups, nullptr, mark_of)); },
               .fields = [&] { return fields_of(groups, nullptr, mark_of); },
               .remedy = kEqualGroups,
               .sample = [&] { return digest_of_samples(groups); }});
  warn_of_uncompared(groups, nullptr);
}

void ZeroCore::warn_of_uncompared(const Groups& groups,
                                  const torch::optim::OptimizerOptions* defaults) {
  if (group_.rank() != 0) return;
  uncompared_options_.warn(group_.log_sink(), "zero", terms_of(groups, defaults, {}));
}

// Stage 1: returns a hash of sampled elements of each gradient, which must be equal on all ranks.
// Stage 2: returns a constant, because the ranks have different gradients.
uint64_t ZeroCore::digest_of_samples(const Groups& groups) const {
  Fnv1a digest;
  if (stage_ == ZeroStage::kShardedGradients) return digest.value();
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.requires_grad()) add_gradient_sample(digest, parameter);
    }
  }
  return digest.value();
}

// Throws if the gradients were not reduced, and therefore differ between the ranks. The first step
// compares whole gradients, later steps only sampled elements, and on a device only which
// parameters have gradients.
void ZeroCore::check_reduced() {
  if (!std::exchange(is_reduction_checked_, true)) return check_whole_gradients();
  if (samples_are_equal_) return;
  check_whole_gradients();
  refuse(
      "the ranks have different gradients. With whole gradients they must be reduced before "
      "step(): run the model through DistributedDataParallel, or reduce them in the same way on "
      "all ranks");
}

void ZeroCore::check_whole_gradients() const {
  std::vector<NamedTensor> stepped;
  std::vector<at::Tensor> gradients;
  const at::Tensor none = at::empty({0});
  for (const auto& flat : buckets_) {
    for (const NamedTensor& parameter : flat->parameters()) {
      const at::Tensor& gradient = parameter.tensor.grad();
      stepped.push_back(parameter);
      gradients.push_back(gradient.defined() ? gradient.detach().to_dense() : none);
    }
  }
  const std::optional<wrap::UnlikeTensor> unlike = wrap::first_unlike(gradients, group_);
  if (!unlike) return;
  refuse(
      format("ranks 0 and {} have different gradients of \"{}\". With whole gradients they "
             "must be reduced before step(): run the model through "
             "DistributedDataParallel, or reduce them in the same way on all ranks",
             unlike->rank, stepped[unlike->place].name));
}

}  // namespace cadre::parallel
