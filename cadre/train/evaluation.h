// How good a model is on data that it was never trained on.
//
// Threads: one. Blocking: evaluate() is collective. Lifetime: keeps nothing. Errors: as the task's
// data, cadre::Error of the group.
#pragma once

#include <cstdint>
#include <optional>

#include "cadre/train/models/model.h"

namespace cadre {
class ReplicaGroup;
}

namespace cadre::train {

class Task;

struct Evaluation {
  double loss = 0;                            // mean in nats, of tokens or samples
  std::optional<double> accuracy = {};        // share of samples, of a classification
  std::optional<double> bigram_entropy = {};  // of text: what the best model that sees one token
                                              // reaches on it
};

// Over all held-out data of the task, each rank computing its share of the samples. The same on all
// ranks, and every rank calls `infer` equally often.
Evaluation evaluate(const Inference& infer, const Task& task, ReplicaGroup& replicas);

}  // namespace cadre::train
