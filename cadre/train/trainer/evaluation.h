// The loss and accuracy of a model on held-out data.
//
// Threads: one. Blocking: both functions are collective. Lifetime: the loader shares the data of
// the task. Errors: as DataLoader, and cadre::Error of the group.
#pragma once

#include <memory>
#include <optional>

#include "cadre/core/os/system.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/mesh/data_ranks.h"
#include "cadre/train/data/data_loader.h"
#include "cadre/train/trainer/models/model.h"

namespace cadre::train {

class Task;

struct Evaluation {
  double loss = 0;  // the mean over the tokens or samples, in nats
  // The fraction of correctly classified samples; only for images.
  std::optional<double> accuracy = {};
  // The bigram conditional entropy of the held-out text, as train/data/bigram.h defines it.
  std::optional<double> bigram_entropy = {};
};

// Returns a loader of all held-out data of the task, in order. They are divided among the ranks
// that compute different samples.
// `is_pinned` is DataLoaderOptions::pin_memory.
std::unique_ptr<DataLoader> make_held_out_loader(const Task& task, const DataRanks& ranks,
                                                 bool is_pinned = false);

// Evaluates the model on all held-out data. Each rank computes its share of the samples. All ranks
// of `world` get the same result, and call `infer` equally often, because it may be collective.
// The losses of all batches are added where the outputs are, and read once.
Evaluation evaluate(const Inference& infer, const Task& task, DataLoader& held_out,
                    const ProcessGroup& world, os::System& system);

}  // namespace cadre::train
