// One interface for all strategies. Every rank holds the whole model, a shard, or some layers.
//
// Threads: one. Blocking: the constructor and every method are collective unless they say that they
// are local. Lifetime: shares the model; keeps the group alive. Errors: cadre::Error of the
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

namespace torch::optim {
class Optimizer;
}

namespace cadre::train {

class Task;

struct BackwardOptions {
  // The number of parts into which this rank's share of the batch is cut, to save memory. A
  // pipeline has parts of its own.
  int64_t num_parts = 1;
  SampledRows rows = {};  // the rows of this rank's share
  // Calls a forward within the contexts that it needs, such as autocast. If empty, the forward is
  // called directly.
  std::function<at::Tensor(const std::function<at::Tensor()>&)> around_forward = {};
};

class Strategy {
 public:
  virtual ~Strategy() = default;

  // Computes this rank's share of a batch. Afterwards the gradients are those of the mean over the
  // samples of all ranks; returns the mean loss of this rank's rows.
  virtual double backward(const Task& task, const Batch& batch, const BackwardOptions& options) = 0;
  // Returns the output for all of `data`, without grad and in evaluation mode. All ranks must call
  // it equally often, unless each has the whole model.
  virtual at::Tensor infer(const at::Tensor& data) = 0;
  // Sets all modules of this rank to training or evaluation mode. Local.
  virtual void set_training(bool on) = 0;
  virtual bool has_whole_model() const { return true; }
  // Returns the elements of each parameter that this rank owns, with their gradients; empty if the
  // module's own parameters have whole gradients. Local.
  virtual std::vector<ParameterShard> gradient_shards() const { return {}; }
  // Returns the elements of each parameter that this rank owns and updates; empty if these are all
  // parameters of the module. Local.
  virtual std::vector<ParameterShard> owned_shards() const { return gradient_shards(); }
  // Scales all gradients so that their common norm is at most `max_norm`. Returns the norm before
  // scaling, equal on all ranks.
  virtual double clip_gradients(double max_norm) = 0;
  // Returns the optimizer of all parameters of which this rank has or owns elements. Local.
  virtual torch::optim::Optimizer& optimizer() = 0;
  // Returns the optimizer whose states are those of parts(). Local.
  virtual torch::optim::Optimizer& local_optimizer() { return optimizer(); }
  // Updates the parameters that have a gradient; later forwards use the new values.
  virtual void step(double learning_rate);
  // Returns the tensors of the model on this rank, for snapshots. Local.
  virtual SnapshotParts parts() const = 0;
  // Returns whether other ranks have parts of the model or of the optimizer's state that this rank
  // does not have.
  virtual bool holds_parts() const { return false; }
  // Must be called after parts() were filled with new values.
  virtual void parts_were_filled() {}
  // See DistributedDataParallel::learned_layout(). Local.
  virtual std::optional<BucketLayout> learned_layout() const { return std::nullopt; }
  // Returns a line about the ranks at the end of a run, equal on all of them; empty if there is
  // nothing to report. `world` is the group of all ranks. Collective.
  virtual std::string summary(const ProcessGroup& /*world*/) const { return ""; }
};

// A strategy in which a rank computes the output of the model for its rows in one call.
class ForwardStrategy : public Strategy {
 public:
  // If a part has no sample on this rank, the rank computes it only if the model is shared with
  // other ranks.
  double backward(const Task& task, const Batch& batch, const BackwardOptions& options) override;

  // data: this rank's rows of a batch, (B, ...); B may be 0. num_samples: the weight of the
  // gradients of this forward. Every rank must run the same number of forwards.
  virtual at::Tensor forward(const at::Tensor& data, int64_t num_samples) = 0;
  // While it is on, backward() of a tensor accumulates gradients on this rank and does not reduce
  // them. Local.
  virtual void set_accumulating(bool on) = 0;
  // Local.
  virtual void set_rows(const SampledRows& rows) = 0;
  // Returns the module whose forward() computes the output.
  virtual Model& model() = 0;

 protected:
  // Returns the loss of an output of forward(), without the auxiliary loss of the model; it is a
  // mean over the rows.
  virtual at::Tensor loss(const Task& task, const at::Tensor& output,
                          const at::Tensor& target) const;
  // Returns the weight of the mean loss of a part that has `num_rows` of this rank's `num_samples`
  // rows of a batch. With these weights the losses of all parts add up to the mean over the batch.
  // 0: no rank whose tokens the loss averages has a row in this part.
  virtual double share_of_step(int64_t num_rows, int64_t num_samples) const;
  // Called after the last part of a batch: reduces the gradients that the wrapper of the model does
  // not reduce.
  virtual void finish_gradients() {}
};

// Makes the strategy of the configuration. REQUIRES: check_layout(), and `layout` is that of the
// configuration. buckets: those of the snapshot from which the run resumes. `model` may be cut:
// each rank then keeps its parts only.
std::unique_ptr<Strategy> make_strategy(const Config& config, const std::shared_ptr<Model>& model,
                                        const RunLayout& layout,
                                        std::optional<BucketLayout> buckets);

}  // namespace cadre::train
