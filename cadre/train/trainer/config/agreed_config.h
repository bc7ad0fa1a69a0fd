// The keys of the configuration that all processes of a run must agree on.
//
// Threads: a plain function. Blocking: never. Errors: none.
#pragma once

#include <vector>

#include "cadre/tensor/group/agreement.h"
#include "cadre/train/trainer/config/config.h"

namespace cadre::train {

// Returns all keys with their values, to be compared among the processes. Paths are left out,
// because they may differ if hosts mount a file system at different places; of parallel.offload
// only whether it is set is compared. The files at the paths of the data, the weights and the
// snapshot are compared by digests instead: see agreed_inputs().
std::vector<AgreedField> agreed_config(Config config);

}  // namespace cadre::train
