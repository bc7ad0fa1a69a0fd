// How the ranks hold the model that they train, behind one interface: the whole model on each of
// them, or a part.
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
#include "cadre/wrap/replica_group.h"

namespace cadre::train {

class Model;
class Task;

class Strategy {
 public:
  virtual ~Strategy() = default;

  // data: this rank's rows of a batch, (B, ...), B may be 0. num_samples: by which the gradients of
  // this forward are weighted. Every rank runs as many forwards as the others.
  virtual at::Tensor forward(const at::Tensor& data, int64_t num_samples) = 0;
  // The output without grad, in evaluation mode. Every rank calls it as often as the others, unless
  // each has the whole model.
  virtual at::Tensor infer(const at::Tensor& data) = 0;
  virtual bool has_whole_model() const { return true; }
  // While it is on, backward() adds to the gradients of this rank only. Local.
  virtual void set_accumulating(bool on) = 0;
  // What the optimizer of this rank updates, the same names in the same order on all ranks. Local.
  virtual std::vector<TrainedTensor> trained() const = 0;
  // What this rank owns of each parameter, with its gradient; empty where the module's own
  // parameters have whole gradients. Local.
  virtual std::vector<ParameterShard> gradient_shards() const { return {}; }
  // Scales the gradients so that their joint norm is at most `max_norm`; returns the norm before,
  // the same on all ranks.
  virtual double clip_gradients(double max_norm) = 0;
  // Calls `step`, which updates those tensors of trained() that have a gradient, as often as it
  // takes to update each once; afterwards forwards see the new values.
  virtual void update(const std::function<void()>& step) { step(); }
  // What this rank has of the model, for snapshots. Local.
  virtual SnapshotParts parts() const = 0;
  // Whether other ranks have what this one has not, of the model or of the optimizer's state.
  virtual bool holds_parts() const { return false; }
  // The values of parts() are others now.
  virtual void parts_were_filled() {}
  // See DistributedDataParallel::learned_layout(). Local.
  virtual std::optional<BucketLayout> learned_layout() const { return std::nullopt; }
};

// Whether each process holds a part of the parameters only: fsdp and hsdp.
bool shards_parameters(const ParallelConfig& config);

struct StrategyGroups {
  ProcessGroup world;
  std::shared_ptr<ReplicaGroup> replicas;  // of the same ranks, for ddp
};

// Throws kInvalidArgument for a strategy that does not go with so many processes, and for a folder
// of offload that is not there. Local.
void check_strategy(const ParallelConfig& config, int world_size);

// REQUIRES: check_strategy(). layout: of the snapshot that the run goes on from.
std::unique_ptr<Strategy> make_strategy(const ParallelConfig& config,
                                        const std::shared_ptr<Model>& model,
                                        const StrategyGroups& groups,
                                        std::optional<BucketLayout> layout);

// A strategy's forward, with what belongs around it.
using ForwardPart = std::function<at::Tensor(const at::Tensor& data, int64_t num_samples)>;

// Computes this rank's share of a batch in parts, to save memory. Leaves the gradients of the mean
// over the samples of all ranks; returns this rank's mean loss.
double backward_in_parts(Strategy& strategy, const Task& task, const Batch& batch,
                         int64_t num_parts, const ForwardPart& forward);

}  // namespace cadre::train
