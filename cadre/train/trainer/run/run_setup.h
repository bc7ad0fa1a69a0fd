// Constructs the objects that a run needs from its configuration: the data, the loaders of batches,
// the model; and converts epochs to steps.
//
// Threads: one. Blocking: open_task() opens or generates the data; make_training_loader() is
// collective. Lifetime: the loader shares the data of the task. Errors: cadre::Error that names the
// key of the configuration to change.
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

// The longest time for finding a text; for python-stdlib this runs the Python interpreter.
inline constexpr Duration kTextSourceTimeout = std::chrono::seconds(30);

std::unique_ptr<Task> open_task(const Config& config, Deadline deadline);

// Throws unless each step has at least one sample for each of the `num_shares` processes or groups
// that have different samples, and the training data have enough samples for one step.
void check_global_batch_size(const Config& config, const Task& task, int num_shares);

// Returns the values that must be equal on all processes in addition to the configuration: digests
// of the data and of model.weights, and the version of libtorch, on which the last bits of results
// depend. Does not communicate. `weights` is nullopt if model.weights is not set.
std::vector<AgreedField> agreed_inputs(const Task& task,
                                       const std::optional<InitialWeights>& weights);

// Collective in `group`. Returns a loader of this rank's share of each batch; without a group, of
// whole batches. `is_pinned` is DataLoaderOptions::pin_memory. REQUIRES: check_global_batch_size().
std::unique_ptr<DataLoader> make_training_loader(const Config& config, const Task& task,
                                                 const std::optional<ProcessGroup>& group,
                                                 bool is_pinned = false);

// Returns which rows of the last full batch this rank got from the loader: see DataLoader.
SampledRows rows_of_rank(const DataLoader& loader, int64_t step, const DataRanks& ranks);

// Replaces run.epochs, and every default that depends on it, by numbers of steps. REQUIRES:
// check_global_batch_size().
void resolve_epochs(Config& config, const Task& task);

// Returns a whole model with its initial values, or with those of model.weights if that is set.
std::shared_ptr<Model> make_initial_model(const Config& config, const Task& task);

// Returns a deferred model, whose tensors have no memory yet
// (cadre/parallel/deferred/deferred_init.h). It is used with strategies that shard the model, so
// that no process ever holds all of its values: the wrapper materializes it unit by unit.
// load_initial_weights() then replaces the values.
std::shared_ptr<Model> make_deferred_model(const Task& task);

// Collective. Fills `parts` from model.weights and returns true. Returns false if model.weights is
// not set.
bool load_initial_weights(const Config& config, const SnapshotParts& parts,
                          const ProcessGroup& world);

}  // namespace cadre::train
