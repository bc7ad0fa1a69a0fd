// Implements everything of ZeroRedundancyOptimizer that does not depend on the optimizer's type:
// which elements of each parameter this rank steps, the gradients of these elements, and the
// gathers after a step.
//
// Threads: one. Blocking: the constructors, add_group(), begin_step(), finish_gathers(),
// gather_states(), check_alike() and check_on_all() are collectives and wait until the group's
// deadline. Lifetime: shares the parameters and the group. Errors: cadre::Error with a text that
// begins with the optimizer's name. If a check fails on one rank, all ranks throw its error.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/flat_layout.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/parallel/zero/options.h"
#include "cadre/tensor/hooks/located_group.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/optim/optimizer_options.h"
#include "cadre/tensor/optim/parameter_state.h"

namespace torch::optim {
class OptimizerOptions;
class OptimizerParamGroup;
}  // namespace torch::optim

namespace cadre::parallel {

class CADRE_EXPORT ZeroCore {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using StateMarkOf = std::function<int64_t(const at::Tensor& leaf)>;

  // The parameter groups and default options with which an optimizer is constructed.
  struct Settings {
    const Groups& groups;
    // The options of groups that have no options; may be null.
    const torch::optim::OptimizerOptions* defaults;
  };
  // Both constructors throw, before they change a parameter, if a parameter cannot be divided, or
  // if parameter groups or options differ between the ranks. This one is for stage 1. It broadcasts
  // rank 0's values and moves the parameters that are in a group and require grad into flat
  // buffers. named: distinct parameters, the same list on all ranks.
  ZeroCore(std::string optimizer, std::vector<NamedTensor> named, const ProcessGroup& group,
           ZeroOptions options, const Settings& settings);
  // This one is for stage 2, with the FlatParameters and shards of a wrapper, whose forward waits
  // for the gathers.
  ZeroCore(std::string optimizer,
           std::vector<std::shared_ptr<shard::FlatParameters>> flat_parameters,
           std::vector<ParameterShard> shards, const Settings& settings);
  // Waits for the gathers of the last step, because without them the parameters could not be read.
  ~ZeroCore();
  ZeroCore(const ZeroCore&) = delete;
  ZeroCore& operator=(const ZeroCore&) = delete;

  // Adds a parameter group, with the same checks as in the constructor.
  void add_group(const torch::optim::OptimizerParamGroup& group,
                 const torch::optim::OptimizerOptions& defaults);

  ZeroStage stage() const { return stage_; }
  const wrap::LocatedGroup& group() const { return group_; }
  const std::vector<std::shared_ptr<shard::FlatParameters>>& buckets() const { return buckets_; }
  // Returns the leaf that the local optimizer updates for a parameter: this rank's elements of it,
  // or the parameter itself if it is frozen.
  at::Tensor leaf_of(const at::Tensor& parameter) const;
  // Returns the tensor that represents the parameter in param_groups(): the parameter itself in
  // stage 1, its shard in stage 2.
  at::Tensor outer_of(const at::Tensor& parameter) const;
  const std::vector<ParameterShard>& shards() const { return shards_; }
  std::vector<ParameterShard> parameter_shards() const;

  // One step consists of begin_step(); then, for each bucket (flat buffer), lend_gradients(), the
  // step of the local optimizer and gather(); and finally end_step(), also after an exception.
  // begin_step() throws on all ranks if a rank cannot step, or if parameter groups, options or
  // states differ between the ranks. It also moves parameters that were added to the groups into
  // buffers. state_mark_of: returns optim_state::mark_of_state() of a leaf; null if states need not
  // be compared.
  void begin_step(const Groups& groups, const StateMarkOf& state_mark_of = {});
  void lend_gradients(size_t bucket);
  void gather(size_t bucket);
  void end_step();
  // Waits for the gathers of the last step.
  void finish_gathers();
  // Calls FlatParameters::show_writes() of all buckets.
  void show_writes() const;

  // Throws on all ranks if the ranks have different `marks`, which are numbers that describe the
  // optimizer states. what: the beginning of the error text.
  void check_alike(std::span<const int64_t> marks, const std::string& what) const;
  // Gathers one field of the optimizer state for all parameters of a bucket, and returns it as one
  // whole tensor for each parameter. parts: this rank's elements, one tensor for each parameter, or
  // undefined if the parameter has no state.
  std::vector<at::Tensor> gather_states(size_t bucket, std::span<const at::Tensor> parts) const;

  // Returns the bucket of the parameter with this name, and its index in the bucket. Throws if
  // there is no such parameter.
  std::pair<std::shared_ptr<shard::FlatParameters>, size_t> find(
      const std::string& parameter) const;
  struct ExpectedState {
    at::IntArrayRef sizes;            // the parameter's sizes, which each state tensor must have
    std::vector<std::string> fields;  // the state tensors of the optimizer's class
    const torch::optim::OptimizerOptions* options;  // the parameter's options; may be null
  };
  // Throws if the state comes from another kind of optimizer, has other sizes, or lacks tensors
  // which the options require, such as a momentum buffer.
  void check_state(const ParameterState& given, const ExpectedState& expected) const;
  [[noreturn]] void refuse(const std::string& problem) const;
  // Runs `check`. If it throws on one rank, all ranks throw that error. Collective.
  void check_on_all(const std::function<void()>& check) const;

 private:
  void start(const Settings& settings);
  void adopt(std::span<const at::Tensor> parameters);
  void agree_on_step(const Groups& groups, const StateMarkOf& state_mark_of);
  void check_gradients(const Groups& groups) const;
  static const void* key_of(const at::Tensor& tensor);
  void check_named() const;
  void check_fresh(std::span<const at::Tensor> parameters) const;
  size_t index_of(const at::Tensor& parameter) const;
  optim_state::GroupTerms terms_of(const Groups& groups,
                                   const torch::optim::OptimizerOptions* defaults,
                                   const StateMarkOf& state_mark_of) const;
  std::vector<AgreedField> fields_of(const Groups& groups,
                                     const torch::optim::OptimizerOptions* defaults,
                                     const StateMarkOf& state_mark_of = {}) const;
  uint64_t digest_of_samples(const Groups& groups) const;
  void check_step(const Groups& groups) const;
  void add_buckets(const std::vector<NamedTensor>& parameters);
  void register_leaves(const std::shared_ptr<shard::FlatParameters>& flat);
  at::Tensor gradient_of(const shard::FlatParameters& flat, size_t parameter) const;
  void check_frozen() const;
  void check_reduced();
  void check_whole_gradients() const;
  void warn_of_uncompared(const Groups& groups, const torch::optim::OptimizerOptions* defaults);

  std::string optimizer_;
  ZeroStage stage_;
  std::vector<NamedTensor> named_;
  wrap::LocatedGroup group_;
  ZeroOptions options_;
  std::vector<std::shared_ptr<shard::FlatParameters>> buckets_;
  // The indices of parameters and, in stage 2, of shards, by the address of the tensor.
  std::unordered_map<const void*, size_t> indices_;
  // The results of leaf_of(), by the address of the parameter.
  std::unordered_map<const void*, at::Tensor> leaves_;
  // Parameters of the groups that were frozen when they were added.
  std::vector<at::Tensor> frozen_;
  std::vector<ParameterShard> shards_;  // stage 2: the shards of the wrapper
  std::optional<DeviceMesh> mesh_;      // stage 1: the ranks as a mesh of one axis
  // During a step: gradients_[bucket][parameter] is the gradient of this rank's elements.
  std::vector<std::vector<at::Tensor>> gradients_;
  std::optional<size_t> lent_;
  int64_t num_steps_ = 0;
  optim_state::UncomparedOptions uncompared_options_;
  bool is_reduction_checked_ = false;
  // Whether the sampled elements of the gradients were equal on all ranks in this step.
  bool samples_are_equal_ = true;
};

// Divides parameters into the flat buffers of stage 1, and returns the indices of each buffer's
// parameters. Each buffer has one dtype and at most cap_bytes, unless a single parameter is larger.
// Parameters keep their order, so that those of the first layers are gathered first.
std::vector<std::vector<size_t>> zero_buckets(std::span<const ParameterSize> parameters,
                                              int64_t cap_bytes);

}  // namespace cadre::parallel
