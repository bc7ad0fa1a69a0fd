// The keys of the configuration that all processes of a run must agree on.
//
// Threads: a plain function. Blocking: never. Errors: none.
#pragma once

#include <vector>

#include "cadre/tensor/group/agreement.h"
#include "cadre/train/trainer/config/config.h"

namespace cadre::train {

// Returns all keys with their values, except paths, which may differ if hosts mount a file system
// at different places. For parallel.offload, returns only whether it is set. The contents at the
// paths of the data, the weights and the snapshot are compared apart from this: see
// agreed_inputs().
std::vector<AgreedField> agreed_config(Config config);

}  // namespace cadre::train
