// One interface for all strategies: every rank holds the whole model, a shard, or some layers.
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
  // Into which this rank's share of the batch is cut, to save memory. A pipeline has its own parts.
  int64_t num_parts = 1;
  SampledRows rows = {};  // this rank's share
  // Calls a forward within the contexts that it needs, such as autocast. Empty: calls it.
  std::function<at::Tensor(const std::function<at::Tensor()>&)> around_forward = {};
};

class Strategy {
 public:
  virtual ~Strategy() = default;

  // Computes this rank's share of a batch. Afterwards the gradients are those of the mean over the
  // samples of all ranks; returns the mean loss of this rank's rows.
  virtual double backward(const Task& task, const Batch& batch, const BackwardOptions& options) = 0;
  // The output for all of `data`, without grad and in evaluation mode. Every rank calls it equally
  // often, unless each has the whole model.
  virtual at::Tensor infer(const at::Tensor& data) = 0;
  // Sets all modules of this rank to training or evaluation mode. Local.
  virtual void set_training(bool on) = 0;
  virtual bool has_whole_model() const { return true; }
  // The elements of each parameter that this rank owns, with their gradients; empty if the module's
  // own parameters have whole gradients. Local.
  virtual std::vector<ParameterShard> gradient_shards() const { return {}; }
  // The elements of each parameter that this rank owns and updates; empty if that is all of the
  // module's own. Local.
  virtual std::vector<ParameterShard> owned_shards() const { return gradient_shards(); }
  // Scales all gradients so that their common norm is at most `max_norm`; returns the norm before
  // that, equal on all ranks.
  virtual double clip_gradients(double max_norm) = 0;
  // The optimizer of all parameters that this rank has or owns parts of. Local.
  virtual torch::optim::Optimizer& optimizer() = 0;
  // The one whose states are those of parts(). Local.
  virtual torch::optim::Optimizer& local_optimizer() { return optimizer(); }
  // Updates the parameters that have a gradient; later forwards use the new values.
  virtual void step(double learning_rate);
  // The tensors of the model on this rank, for snapshots. Local.
  virtual SnapshotParts parts() const = 0;
  // Whether other ranks have what this one has not, of the model or of the optimizer's state.
  virtual bool holds_parts() const { return false; }
  // Must be called after parts() were filled with new values.
  virtual void parts_were_filled() {}
  // See DistributedDataParallel::learned_layout(). Local.
  virtual std::optional<BucketLayout> learned_layout() const { return std::nullopt; }
  // A line about the ranks at the end of a run, equal on all of them; empty if there is nothing to
  // say. `world`: all ranks, which all call it.
  virtual std::string summary(const ProcessGroup& /*world*/) const { return ""; }
};

// A strategy of which a rank computes the output of the model for its rows in one call.
class ForwardStrategy : public Strategy {
 public:
  // Without a sample in a part, only the ranks of a model that other ranks share compute it.
  double backward(const Task& task, const Batch& batch, const BackwardOptions& options) override;

  // data: this rank's rows of a batch, (B, ...); B may be 0. num_samples: the weight of the
  // gradients of this forward. Every rank runs the same number of forwards.
  virtual at::Tensor forward(const at::Tensor& data, int64_t num_samples) = 0;
  // While it is on, backward() of a tensor accumulates gradients on this rank without reducing
  // them. Local.
  virtual void set_accumulating(bool on) = 0;
  // Local.
  virtual void set_rows(const SampledRows& rows) = 0;
  // The module whose forward() computes the output.
  virtual Model& model() = 0;

 protected:
  // Loss of an output of forward(), without what the model adds to it; mean over the rows.
  virtual at::Tensor loss(const Task& task, const at::Tensor& output,
                          const at::Tensor& target) const;
  // The weight of the mean loss of one of several parts, with `num_rows` of this rank's
  // `num_samples` rows of a batch, so that those of all parts add up to the mean over the batch. 0:
  // no rank whose tokens the loss is the mean of has a row in this part.
  virtual double share_of_step(int64_t num_rows, int64_t num_samples) const;
  // After the last part of a batch: what the wrapper of the model does not reduce.
  virtual void finish_gradients() {}
};

// REQUIRES: check_layout() and the layout of the configuration. buckets: those of the snapshot from
// which the run resumes. `model` may be cut: each rank then keeps its parts only.
std::unique_ptr<Strategy> make_strategy(const Config& config, const std::shared_ptr<Model>& model,
                                        const RunLayout& layout,
                                        std::optional<BucketLayout> buckets);

}  // namespace cadre::train
