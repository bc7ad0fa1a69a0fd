#include "cadre/parallel/shard/sharded_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/division/parameter_division.h"
#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/parallel/shard/nonfinite_gradients.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/hooks/power_sum.h"

namespace cadre {
namespace {

void check_is_reduced(const ParameterShard& shard) {
  const bool is_partial = std::ranges::any_of(
      shard.placements, [](const Placement& placement) { return placement.partial() != nullptr; });
  if (!is_partial) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("the norm of gradients: \"{}\" has the placements {} on the mesh {}, so no "
                     "rank has its gradient; call redistribute() on it before",
                     shard.name, to_string(shard.placements), shard.mesh.to_string()));
}

// Computes the norm. Parameters that are divided along the same mesh axes have one common sum,
// which is reduced in the groups of these axes.
class JointNorm {
 public:
  JointNorm(std::span<const ParameterShard> shards, double p) : shards_(shards), p_(p) {
    for (const ParameterShard& shard : shards) add(shard);
  }

  double value() {
    std::vector<std::span<const at::Tensor>> sets;
    for (const Part& part : parts_) sets.emplace_back(part.owned);
    const std::vector<double> sums = wrap::power_sums(sets, p_);
    double total = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
      Part& part = parts_[i];
      part.value = sums[i];
      for (const ProcessGroup& group : part.groups) reduce(group, part.value);
      if (part.is_flat) agree(part);
      total = wrap::joint_power_sum(total, part.value, p_);
    }
    return wrap::norm_of_power_sum(total, p_);
  }

  const std::vector<at::Tensor>& gradients() const { return gradients_; }

  // Throws an error that names the first non-finite gradient, the same on all ranks. `norm` is NaN
  // or infinite.
  [[noreturn]] void refuse(double norm) const {
    std::string cause = "every element is finite, so the sum of their powers exceeds float64";
    if (const auto found = find_nonfinite_gradient(shards_)) {
      cause = format("the first gradient with an element that is not finite is that of \"{}\"{}",
                     found->parameter, found->rank ? format(", on rank {}", *found->rank) : "");
    }
    throw Error(ErrorCode::kInvalidArgument,
                format("clip_grad_norm_: the {}-norm of the gradients of {} parameters is {}; {}. "
                       "No gradient was scaled. Lower the learning rate or the scale of the loss, "
                       "or leave out this step on all ranks",
                       p_, shards_.size(), norm, cause));
  }

 private:
  struct Part {
    std::vector<ProcessGroup> groups;
    std::vector<at::Tensor> owned = {};  // the gradients that this rank contributes
    double value = 0;
    bool is_flat = false;  // a parameter of this sum has a flat axis
  };

  static bool has(const std::vector<ProcessGroup>& groups, const ProcessGroup& group) {
    return std::ranges::any_of(groups, [&](const ProcessGroup& other) {
      return &other.communicator() == &group.communicator();
    });
  }

  static bool are_same(const std::vector<ProcessGroup>& a, const std::vector<ProcessGroup>& b) {
    return std::ranges::equal(a, b, [](const ProcessGroup& x, const ProcessGroup& y) {
      return &x.communicator() == &y.communicator();
    });
  }

  void add(const ParameterShard& shard) {
    check_is_reduced(shard);
    const std::vector<ProcessGroup> groups = shard::dividing_groups({&shard, 1});
    auto part = std::find_if(parts_.begin(), parts_.end(), [&](const Part& candidate) {
      return are_same(candidate.groups, groups);
    });
    if (part == parts_.end()) part = parts_.insert(part, {.groups = groups});
    part->is_flat = part->is_flat || shard.flat_axis.has_value();
    const at::Tensor& gradient = shard.values.grad();
    if (!gradient.defined()) return;
    if (gradient.layout() != at::kStrided) {
      throw Error(ErrorCode::kInvalidArgument,
                  format("the norm of gradients: the gradient of \"{}\", of sizes {}, is not "
                         "dense; make it dense, for example by an embedding with sparse(false)",
                         shard.name, list_of(gradient.sizes())));
    }
    gradients_.push_back(gradient);
    if (!shard.is_copy) part->owned.push_back(gradient);
  }

  // Ranks along an axis that only divides other parameters have the same elements, but possibly in
  // different flat shards, so their sums may differ in the last bits. They all take the largest
  // sum.
  void agree(Part& part) const {
    std::vector<ProcessGroup> others;
    for (const Part& other : parts_) {
      for (const ProcessGroup& group : other.groups) {
        if (!has(part.groups, group) && !has(others, group)) others.push_back(group);
      }
    }
    for (const ProcessGroup& group : others) take_largest(group, part.value);
  }

  void reduce(const ProcessGroup& group, double& value) const {
    if (std::isinf(p_)) {
      take_largest(group, value);
      return;
    }
    const at::Tensor sum = at::full({1}, value, at::kDouble);
    group.all_reduce(sum);
    value = sum.item<double>();
  }

  // Whether a value is NaN is sent as a second element, because a maximum does not preserve NaN.
  static void take_largest(const ProcessGroup& group, double& value) {
    const bool is_nan = std::isnan(value);
    const at::Tensor largest = at::tensor({is_nan ? 0.0 : value, is_nan ? 1.0 : 0.0}, at::kDouble);
    group.all_reduce(largest, {.op = ReduceOp::kMax});
    const double* const values = largest.const_data_ptr<double>();
    value = values[1] != 0 ? std::numeric_limits<double>::quiet_NaN() : values[0];
  }

  std::span<const ParameterShard> shards_;
  double p_;
  std::vector<Part> parts_;
  std::vector<at::Tensor> gradients_;
};

}  // namespace

double gradient_norm(std::span<const ParameterShard> shards, double norm_type) {
  constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  return clip_grad_norm_(shards, kNoLimit, {.norm_type = norm_type});
}

double clip_grad_norm_(std::span<const ParameterShard> shards, double max_norm,
                       const ClipGradNormOptions& options) {
  check_clip_options(max_norm, options);
  const at::NoGradGuard no_grad;
  shard::check_gradients_reduced("cadre::clip_grad_norm_", shards);
  JointNorm joint(shards, options.norm_type);
  const double norm = joint.value();
  if (options.error_if_nonfinite && !std::isfinite(norm)) joint.refuse(norm);
  limit_gradients(joint.gradients(), norm, max_norm);
  return norm;
}

}  // namespace cadre
