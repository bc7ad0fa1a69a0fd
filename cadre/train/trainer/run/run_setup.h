// Constructs what a run needs from its configuration: the data, their batches, the model, and a
// schedule in steps.
//
// Threads: one. Blocking: open_task() opens or generates the data; make_training_loader() is
// collective. Lifetime: the loader shares the data of the task. Errors: cadre::Error with the key
// of the configuration that does not fit.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/mesh/data_ranks.h"
#include "cadre/train/checkpoint/snapshot_parts.h"
#include "cadre/train/data/data_loader.h"
#include "cadre/train/trainer/config/config.h"
#include "cadre/train/trainer/models/model.h"
#include "cadre/train/trainer/run/initial_weights.h"
#include "cadre/train/trainer/tasks/task.h"

namespace cadre::train {

// The time limit for finding a text, which may run the Python interpreter.
inline constexpr Duration kTextSourceTimeout = std::chrono::seconds(30);

std::unique_ptr<Task> open_task(const Config& config, Deadline deadline);

// Throws unless each of the processes that have different samples has at least one in every step,
// and the training data suffice for a step.
void check_global_batch_size(const Config& config, const Task& task, int num_shares);

// Returns the values, other than the configuration, that must be equal on all processes of a run:
// digests of the contents of the data and of model.weights, and the version of libtorch, which
// determines the last bits. Does not communicate. weights: nullopt if model.weights is not set.
std::vector<AgreedField> agreed_inputs(const Task& task,
                                       const std::optional<InitialWeights>& weights);

// Collective in `group`. Returns a loader of this rank's parts of the batches; without a group, of
// whole batches. REQUIRES: check_global_batch_size().
std::unique_ptr<DataLoader> make_training_loader(const Config& config, const Task& task,
                                                 const std::optional<ProcessGroup>& group);

// Returns the rows of this rank in the full batch that the loader delivered last: see DataLoader.
SampledRows rows_of_rank(const DataLoader& loader, int64_t step, const DataRanks& ranks);

// Replaces run.epochs, and every default that depends on it, by numbers of steps.
// REQUIRES: check_global_batch_size().
void resolve_epochs(Config& config, const Task& task);

// Returns a whole model with its initial values, or the values of model.weights if it is set.
std::shared_ptr<Model> make_initial_model(const Config& config, const Task& task);

// Returns a deferred model (see cadre/parallel/deferred/deferred_init.h), for strategies that shard
// the model: so no process holds all of its values at a time. The wrapper materializes it unit by
// unit; load_initial_weights() then replaces the values.
std::shared_ptr<Model> make_deferred_model(const Task& task);

// Collective. Fills `parts` from model.weights and returns true; returns false if model.weights is
// not set.
bool load_initial_weights(const Config& config, const SnapshotParts& parts,
                          const ProcessGroup& world);

}  // namespace cadre::train
