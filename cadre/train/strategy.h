// One interface for all strategies: every rank holds the whole model, or a shard.
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

#include "cadre/buckets/bucket_layout.h"
#include "cadre/checkpoint/snapshot_parts.h"
#include "cadre/data/dataset.h"
#include "cadre/group/process_group.h"
#include "cadre/shard/parameter_shard.h"
#include "cadre/train/config/config.h"
#include "cadre/train/optimizer.h"

namespace cadre::train {

class Model;
class Task;

class Strategy {
 public:
  virtual ~Strategy() = default;

  // data: this rank's rows of a batch, (B, ...); B may be 0. num_samples: the weight of the
  // gradients of this forward. Every rank runs the same number of forwards.
  virtual at::Tensor forward(const at::Tensor& data, int64_t num_samples) = 0;
  // The output without grad, in evaluation mode. Every rank calls it equally often, unless each has
  // the whole model.
  virtual at::Tensor infer(const at::Tensor& data) = 0;
  virtual bool has_whole_model() const { return true; }
  // While it is on, backward() accumulates gradients on this rank without reducing them. Local.
  virtual void set_accumulating(bool on) = 0;
  // The tensors that the optimizer of this rank updates, with equal names in equal order on all
  // ranks. Local.
  virtual std::vector<TrainedTensor> trained() const = 0;
  // The elements of each parameter that this rank owns, with their gradients; empty if the module's
  // own parameters have whole gradients. Local.
  virtual std::vector<ParameterShard> gradient_shards() const { return {}; }
  // Scales all gradients so that their common norm is at most `max_norm`; returns the norm before
  // that, equal on all ranks.
  virtual double clip_gradients(double max_norm) = 0;
  // Calls `step`, which updates the tensors of trained() that have a gradient, until each was
  // updated once; later forwards use the new values.
  virtual void update(const std::function<void()>& step) { step(); }
  // The tensors of the model on this rank, for snapshots. Local.
  virtual SnapshotParts parts() const = 0;
  // Whether other ranks have what this one has not, of the model or of the optimizer's state.
  virtual bool holds_parts() const { return false; }
  // Must be called after parts() were filled with new values.
  virtual void parts_were_filled() {}
  // See DistributedDataParallel::learned_layout(). Local.
  virtual std::optional<BucketLayout> learned_layout() const { return std::nullopt; }
};

// Whether each process holds only a shard of the parameters: fsdp and hsdp.
bool shards_parameters(const ParallelConfig& config);

// Throws kInvalidArgument for a strategy that does not suit the number of processes, and if the
// folder of offload does not exist. Local.
void check_strategy(const ParallelConfig& config, int world_size);

// REQUIRES: check_strategy(). layout: that of the snapshot from which the run resumes.
std::unique_ptr<Strategy> make_strategy(const ParallelConfig& config,
                                        const std::shared_ptr<Model>& model,
                                        const ProcessGroup& world,
                                        std::optional<BucketLayout> layout);

// A strategy's forward, within the contexts that it needs, such as autocast.
using ForwardPart = std::function<at::Tensor(const at::Tensor& data, int64_t num_samples)>;

// Computes this rank's share of a batch in parts, to save memory. Afterwards the gradients are
// those of the mean over the samples of all ranks; returns the mean loss of this rank.
double backward_in_parts(Strategy& strategy, const Task& task, const Batch& batch,
                         int64_t num_parts, const ForwardPart& forward);

}  // namespace cadre::train
