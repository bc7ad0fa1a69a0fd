// What a run begins with, by its configuration: the data, their batches, the model, and a schedule
// in steps.
//
// Threads: one. Blocking: open_task() opens or makes the data. Lifetime: the loader shares the data
// of the task. Errors: cadre::Error with the key of the configuration that does not fit.
#pragma once

#include <memory>

#include "cadre/base/deadline.h"
#include "cadre/base/types.h"
#include "cadre/checkpoint/snapshot_parts.h"
#include "cadre/data/data_loader.h"
#include "cadre/group/process_group.h"
#include "cadre/train/config/config.h"
#include "cadre/train/models/model.h"
#include "cadre/train/tasks/task.h"

namespace cadre::train {

// What finding a text may take.
inline constexpr Duration kTextSourceTimeout = std::chrono::seconds(30);

std::unique_ptr<Task> open_task(const Config& config, Deadline deadline);

// The batches of this rank.
std::unique_ptr<DataLoader> make_training_loader(const Config& config, const Task& task, Rank rank,
                                                 int world_size);

// From here on everything in the configuration is counted in steps.
void resolve_epochs(Config& config, const DataLoader& loader);

// A whole model with its initial values: those of model.weights, if the configuration names a file.
std::shared_ptr<Model> make_initial_model(const Config& config, const Task& task);

// For a strategy that gives each process a part of the model: the model is deferred (see
// cadre/deferred/deferred_init.h), so that no process holds all of its values at a time. The
// wrapper materializes it in parts; load_initial_weights() then replaces the values.
std::shared_ptr<Model> make_deferred_model(const Task& task);

// Collective. Fills `parts` from model.weights, if the configuration names a file; returns whether
// it does.
bool load_initial_weights(const Config& config, const SnapshotParts& parts,
                          const ProcessGroup& world);

}  // namespace cadre::train
