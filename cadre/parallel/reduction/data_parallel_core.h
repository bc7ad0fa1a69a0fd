// The part of a wrapper that averages gradients over ranks and does not depend on the module's
// type. DistributedDataParallel and FullyShardedDataParallel use it.
//
// Threads: forward, backward and every method from one thread.
// Blocking: the constructor is collective, and so is before_forward() if it broadcasts buffers.
// Lifetime: keeps the module and the group alive. Errors: cadre::Error.
// In a group of one rank it may have no hooks and no gradient storage; then it copies nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/parallel/reduction/agreement/gradient_weighting.h"
#include "cadre/parallel/reduction/agreement/wrapper.h"
#include "cadre/tensor/hooks/located_group.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace torch::nn {
class Module;
}

namespace cadre {
class GradientStorage;
struct AgreedField;
}  // namespace cadre
namespace cadre::wrap {
class ParameterWatch;
}  // namespace cadre::wrap

namespace cadre::reduction {

class BufferBroadcast;
class Reducer;
class ReplicaWatch;

struct DataParallelOptions {
  // The name with which errors begin: "DistributedDataParallel". Static text, because the calls
  // that the wrapper issues on its group refer to it and may outlive the wrapper.
  const char* wrapper;
  std::string component;  // the component in log lines, such as "ddp"
  GradientWeighting weighting = GradientWeighting::kSamples;
  // Copies rank 0's buffers to all ranks before each synchronized forward in training mode.
  bool broadcast_buffers = true;
  // Copies rank 0's parameters to all ranks at construction, and materializes deferred ones. If
  // false, the caller or the function that makes the storage must do both.
  bool broadcast_parameters = true;
  // Names of parameters that are neither broadcast nor reduced.
  std::vector<std::string> ignored = {};
  // If true, in a group of one rank the core leaves gradients unchanged and installs no hook.
  bool is_idle_alone = true;
  // Whether a module without a trained parameter is an error. A sharded module may be frozen as a
  // whole, such as a teacher or a reference, because its parameters are gathered all the same.
  bool needs_trained = true;
  // A sentence that says how the program may change the parameters of a wrapped module. The error
  // that reports such a change ends with it.
  std::string change_remedy =
      "Wrap the module again after the change, on all ranks, once this wrapper is destroyed, and "
      "give its parameters to a new optimizer";
  // Called at the start of each forward, also without grad and in a group of one rank. May be
  // empty.
  std::function<void()> before_forward = {};
  ParameterValues values = ParameterValues::kUnwatched;
  // Makes the error that all ranks throw after set_written(). The name and rank of the wrapper are
  // put in front of its message. `ranks` names the ranks that have written.
  std::function<Error(const std::string& parameter, const std::string& ranks)> written_error = {};
  // Returns further options of this rank that must be equal on all ranks, as `weighting` and
  // `broadcast_buffers` must be. Called once, in the constructor. If it throws on one rank, all
  // ranks throw.
  std::function<std::vector<AgreedField>()> agreed = {};
};

// Makes the storage of the gradients, after the parameters have been broadcast. `trained` are the
// parameters that require grad. `group` is the process group; errors thrown through it say in which
// part of a step this rank was. Collective.
using MakeGradientStorage = std::function<std::unique_ptr<GradientStorage>(
    std::vector<NamedTensor> trained, const wrap::LocatedGroup& group)>;

// Throws the error for the use of a wrapper from which the program has moved.
[[noreturn]] CADRE_EXPORT void refuse_moved_from();

class CADRE_EXPORT DataParallelCore {
 public:
  // Checks that options and replicas match, then broadcasts rank 0's parameters and buffers.
  // Parameters registered under two names count once. Throws kInvalidArgument, the same on all
  // ranks and before anything is changed, for a null module, a parameter that another wrapper
  // reduces or whose dtype cannot be reduced, and options that differ between ranks.
  DataParallelCore(const std::shared_ptr<const torch::nn::Module>& module,
                   const ProcessGroup& group, DataParallelOptions options,
                   const MakeGradientStorage& make_storage);
  ~DataParallelCore();
  DataParallelCore(const DataParallelCore&) = delete;
  DataParallelCore& operator=(const DataParallelCore&) = delete;

  // `num_rows` is size(0) of the first argument of the forward that is a tensor with a dimension.
  // It is 1 if no tensor has a dimension, and nullopt if the wrapper cannot find the tensors in the
  // arguments.
  void before_forward(bool is_training, std::optional<int64_t> num_rows);
  // `outputs` are the tensors that the forward has returned.
  void after_forward(std::span<const at::Tensor> outputs);

  // Called when forward() of this rank has written to the parameter `parameter`. Then the running
  // pass, if it has not yet issued all of its reductions, or else the next one throws on all ranks
  // (DataParallelOptions::written_error). Used by wrappers that check their parameters themselves
  // (ParameterValues::kUnwatched).
  void set_written(std::string_view parameter);
  void set_num_samples(int64_t count);
  void enter_no_sync(bool losses_are_weighted);
  void leave_no_sync();
  void reduce_gradients();
  at::Tensor backward_in_parts(std::span<const int64_t> num_samples,
                               const std::function<at::Tensor(size_t)>& loss_of);
  double mean_over_ranks(double value);
  // Adds a call at the start of each forward, after DataParallelOptions::before_forward.
  void call_before_forward(std::function<void()> call);
  // Registers `call`. From the next forward on, `call` runs at the start of each backward through
  // an output of a forward, before any gradient inside that forward is computed, even under
  // no_sync() and in a group of one rank.
  void call_before_backward(std::function<void()> call);
  // See GradientStorage::zero_grad().
  void zero_grad(bool set_to_none);
  std::optional<BucketLayout> learned_layout() const;
  const Wrapper& wrapper() const { return wrapper_; }

 private:
  void agree(const torch::nn::Module* module) const;
  std::vector<NamedTensor> parameters_of(const torch::nn::Module& module) const;
  void check_parameters(std::span<const NamedTensor> parameters) const;
  void check_devices(const torch::nn::Module& module) const;
  void start(const std::shared_ptr<const torch::nn::Module>& module,
             const MakeGradientStorage& make_storage);
  void broadcast_buffers();
  void watch_backwards(std::span<const at::Tensor> outputs) const;
  void check_unchanged() const;
  int64_t last_num_samples() const;

  wrap::LocatedGroup group_;
  Wrapper wrapper_;
  const DataParallelOptions options_;
  std::vector<std::function<void()>> calls_before_forward_;
  // Only this object owns the list. The hooks of outputs may outlive the core, so they hold weak
  // references to the list.
  std::shared_ptr<std::vector<std::function<void()>>> calls_before_backward_ =
      std::make_shared<std::vector<std::function<void()>>>();
  // These four members are null in a group of one rank if is_idle_alone is set.
  std::unique_ptr<BufferBroadcast> buffers_;
  std::unique_ptr<wrap::ParameterWatch> watch_;
  std::unique_ptr<ReplicaWatch> replicas_;
  std::unique_ptr<Reducer> reducer_;
  bool has_forward_ = false;
  int64_t num_forwards_ = 0;                     // counts the synchronized forwards with grad
  int num_no_sync_ = 0;                          // the number of NoSync objects that exist now
  bool is_recorded_ = false;                     // whether grad mode was on when the forward began
  std::optional<int64_t> num_samples_;           // set_num_samples() sets it for the next forward
  std::optional<int64_t> last_num_samples_ = 0;  // the number of samples of the last forward
};

}  // namespace cadre::reduction
