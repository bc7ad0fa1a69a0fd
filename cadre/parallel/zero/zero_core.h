// Everything of ZeroRedundancyOptimizer that does not depend on the optimizer's type: which part of
// each parameter this rank steps, the gradients of these parts, and the gathers after a step.
//
// Threads: one. Blocking: the constructors, add_group(), begin_step(), finish_gathers(),
// gather_states(), check_alike() and check_on_all() are collective, until the group's deadline.
// Lifetime: shares the parameters and the group. Errors: cadre::Error, which begins with the
// optimizer's name; an error of one rank is thrown on all of them.
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

  // The groups and defaults from which an optimizer is made.
  struct Settings {
    const Groups& groups;
    // Used for groups without options; null if there are none.
    const torch::optim::OptimizerOptions* defaults;
  };
  // Both constructors throw, before anything is changed, for parameters that cannot be divided, and
  // for groups or options that differ between the ranks. Stage 1. `named`: distinct, the same list
  // on all ranks; parameters that are in a group and require grad are laid into buffers. Rank 0's
  // values are copied to all ranks.
  ZeroCore(std::string optimizer, std::vector<NamedTensor> named, const ProcessGroup& group,
           ZeroOptions options, const Settings& settings);
  // Stage 2, for a wrapper whose forward waits for the gathers.
  ZeroCore(std::string optimizer,
           std::vector<std::shared_ptr<shard::FlatParameters>> flat_parameters,
           std::vector<ParameterShard> shards, const Settings& settings);
  // Waits for the gathers of the last step. Without them the parameters could not be read.
  ~ZeroCore();
  ZeroCore(const ZeroCore&) = delete;
  ZeroCore& operator=(const ZeroCore&) = delete;

  // Adds a group, with the same checks as the constructor.
  void add_group(const torch::optim::OptimizerParamGroup& group,
                 const torch::optim::OptimizerOptions& defaults);

  ZeroStage stage() const { return stage_; }
  const wrap::LocatedGroup& group() const { return group_; }
  const std::vector<std::shared_ptr<shard::FlatParameters>>& buckets() const { return buckets_; }
  // Returns the tensor that the local optimizer steps for a parameter; the parameter itself if it
  // is frozen.
  at::Tensor leaf_of(const at::Tensor& parameter) const;
  // Returns the tensor whose grad() the user sees: the parameter, or its shard.
  at::Tensor outer_of(const at::Tensor& parameter) const;
  const std::vector<ParameterShard>& shards() const { return shards_; }
  std::vector<ParameterShard> parameter_shards() const;

  // One step is begin_step(), then for each bucket lend_gradients(), the local step, and gather();
  // then end_step(), also after an exception. begin_step() throws on all ranks if a rank cannot
  // step, or if groups, options or states differ between the ranks. It also takes over parameters
  // that were added to the groups. state_mark_of: optim_state::mark_of_state() of a leaf; null if
  // the ranks' states cannot differ.
  void begin_step(const Groups& groups, const StateMarkOf& state_mark_of = {});
  void lend_gradients(size_t bucket);
  void gather(size_t bucket);
  void end_step();
  // Waits for the gathers of the last step. Returns at once if they have ended.
  void finish_gathers();
  // Calls FlatParameters::show_writes() of all buckets.
  void show_writes() const;

  // Throws if states are not alike on all ranks; `marks` must be equal numbers on all of them.
  void check_alike(std::span<const int64_t> marks, const std::string& what) const;
  // Gathers one tensor of the state for all parameters of a bucket. parts: this rank's, by
  // parameter of the bucket, undefined if there is none. Returns the tensors of the whole
  // parameters.
  std::vector<at::Tensor> gather_states(size_t bucket, std::span<const at::Tensor> parts) const;

  // Returns the bucket of a parameter, and its index there; throws for a name that no parameter
  // has.
  std::pair<std::shared_ptr<shard::FlatParameters>, size_t> find(
      const std::string& parameter) const;
  struct ExpectedState {
    at::IntArrayRef sizes;                          // the sizes of each tensor
    std::vector<std::string> fields;                // the fields of the optimizer's class
    const torch::optim::OptimizerOptions* options;  // is null if they are not known
  };
  // Throws for a state that is of another optimizer or has other sizes, or that lacks tensors which
  // the options need.
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
  // The index of a parameter, and in stage 2 also of a shard; the key is the address.
  std::unordered_map<const void*, size_t> indices_;
  // The leaf of a parameter; the key is the address.
  std::unordered_map<const void*, at::Tensor> leaves_;
  std::vector<at::Tensor> frozen_;      // frozen parameters, which are adopted without a leaf
  std::vector<ParameterShard> shards_;  // the shards in stage 2
  std::optional<DeviceMesh> mesh_;      // the mesh in stage 1
  // The gradients during a step, by bucket and parameter.
  std::vector<std::vector<at::Tensor>> gradients_;
  std::optional<size_t> lent_;
  int64_t num_steps_ = 0;
  optim_state::UncomparedOptions uncompared_options_;
  bool is_reduction_checked_ = false;
  // The sampled elements of this step's gradients are equal on all ranks.
  bool samples_are_equal_ = true;
};

// Returns the indices of the parameters of each flat buffer of stage 1. A buffer has one dtype, and
// parameters keep their order, so that those of the first layers are gathered first. A buffer is
// closed before it exceeds the cap.
std::vector<std::vector<size_t>> zero_buckets(std::span<const ParameterSize> parameters,
                                              int64_t cap_bytes);

}  // namespace cadre::parallel
