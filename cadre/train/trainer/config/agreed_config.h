// The keys of the configuration that all processes of a run must agree on.
//
// Threads: a plain function. Blocking: never. Errors: none.
#pragma once

#include <vector>

#include "cadre/tensor/group/agreement.h"
#include "cadre/train/trainer/config/config.h"

namespace cadre::train {

// All keys with their values, except paths, which may differ where hosts mount a file system at
// different places. For parallel.offload only whether it is set. What is read at the paths of the
// data, the weights and the snapshot is compared by its content: see agreed_inputs().
std::vector<AgreedField> agreed_config(Config config);

}  // namespace cadre::train
