// The common interface of all strategies. A rank has the whole model, a shard of it, or some of its
// layers.
//
// Threads: one. Blocking: the constructor and every method are collective, except methods that are
// marked as local. Lifetime: shares the model; keeps the group alive. Errors: cadre::Error of the
// wrapper.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/train/checkpoint/snapshot_parts.h"
#include "cadre/train/data/dataset.h"
#include "cadre/train/trainer/config/config.h"
#include "cadre/train/trainer/models/model.h"
#include "cadre/train/trainer/strategy/run_layout.h"
#include "cadre/train/trainer/strategy/scalar_sum.h"

namespace torch::optim {
class Optimizer;
}

namespace cadre::train {

class Task;

struct BackwardOptions {
  // The number of parts into which this rank's share of the batch is divided, to save memory. A
  // pipeline ignores it and uses its microbatches.
  int64_t num_parts = 1;
  SampledRows rows = {};  // the positions of this rank's rows in the global batch
  // Wraps each call of the model's forward, for example to run it under autocast. If empty, the
  // forward is called directly.
  std::function<at::Tensor(const std::function<at::Tensor()>&)> around_forward = {};
};

class Strategy {
 public:
  virtual ~Strategy() = default;

  // Computes forward and backward of this rank's share of a batch. Afterwards the gradients are
  // means over the samples of all ranks. Returns the mean loss of this rank's rows, of which the
  // copy to the host has begun.
  virtual ScalarSum backward(const Task& task, const Batch& batch,
                             const BackwardOptions& options) = 0;
  // Returns the model's output for `data`, without grad and in evaluation mode. Unless each rank
  // has the whole model, all ranks must call it equally often.
  virtual at::Tensor infer(const at::Tensor& data) = 0;
  // Sets all modules on this rank to training or evaluation mode. Local.
  virtual void set_training(bool on) = 0;
  virtual bool has_whole_model() const { return true; }
  // Returns this rank's shards of the parameters, with their gradients. Returns an empty list if
  // the module's own parameters have whole gradients. Local.
  virtual std::vector<ParameterShard> gradient_shards() const { return {}; }
  // Returns the shards of the parameters that this rank updates. Returns an empty list if it
  // updates all parameters of the module. Local.
  virtual std::vector<ParameterShard> owned_shards() const { return gradient_shards(); }
  // Scales all gradients so that their total norm over all ranks is at most `max_norm`. Returns the
  // norm before scaling, equal on all ranks.
  virtual double clip_gradients(double max_norm) = 0;
  // Returns the optimizer of all parameters of which this rank has elements or updates a shard.
  // Local.
  virtual torch::optim::Optimizer& optimizer() = 0;
  // Returns the optimizer whose states belong to parts(). Local.
  virtual torch::optim::Optimizer& local_optimizer() { return optimizer(); }
  // Updates the parameters that have a gradient; later forwards use the new values.
  virtual void step(double learning_rate);
  // Returns this rank's tensors of the model, for snapshots. Local.
  virtual SnapshotParts parts() const = 0;
  // Returns whether this rank lacks parts of the model or of the optimizer's state that other ranks
  // have.
  virtual bool holds_parts() const { return false; }
  // Call this function after a load has written new values into the tensors of parts().
  virtual void parts_were_filled() {}
  // Returns the layout of the gradient buckets, if the strategy uses a DistributedDataParallel: see
  // DistributedDataParallel::learned_layout(). Local.
  virtual std::optional<BucketLayout> learned_layout() const { return std::nullopt; }
  // Returns a line for the end of a run about the ranks, such as a straggler; it is equal on all
  // ranks, and empty if there is nothing to report. `world` is the group of all ranks. Collective.
  virtual std::string summary(const ProcessGroup& /*world*/) const { return ""; }
};

// A strategy in which each rank computes the model's output for its rows with one call.
class ForwardStrategy : public Strategy {
 public:
  // If this rank has no samples in a part, it skips that part, unless the model is sharded: then
  // its forward is a collective.
  ScalarSum backward(const Task& task, const Batch& batch, const BackwardOptions& options) override;

  // `data` (B, ...) are this rank's rows of a batch; B may be 0. `num_samples` is the weight of
  // this forward's gradients. Every rank must run the same number of forwards.
  virtual at::Tensor forward(const at::Tensor& data, int64_t num_samples) = 0;
  // While this is on, each backward accumulates gradients on this rank and does not reduce them.
  // Local.
  virtual void set_accumulating(bool on) = 0;
  // Local.
  virtual void set_rows(const SampledRows& rows) = 0;
  // Returns the module whose forward() computes the output.
  virtual Model& model() = 0;

 protected:
  // Returns the mean loss over the rows of an output of forward(), without the model's auxiliary
  // loss.
  virtual at::Tensor loss(const Task& task, const at::Tensor& output,
                          const at::Tensor& target) const;
  // Returns the weight of the mean loss of a part with `num_rows` of this rank's `num_samples`
  // rows. With these weights the losses of all parts add up to the mean over the batch. 0 means
  // that no rank contributes a row to this part's loss.
  virtual double share_of_step(int64_t num_rows, int64_t num_samples) const;
  // Is called after the last part of a batch. Reduces the gradients that the model's wrapper does
  // not reduce.
  virtual void finish_gradients() {}
};

// Makes the strategy of the configuration. REQUIRES: check_layout(), and `layout` is that of the
// configuration. `buckets` is the bucket layout in the snapshot from which the run resumes. `model`
// may be cut into stages: each rank then keeps only its own.
std::unique_ptr<Strategy> make_strategy(const Config& config, const std::shared_ptr<Model>& model,
                                        const RunLayout& layout,
                                        std::optional<BucketLayout> buckets);

}  // namespace cadre::train
