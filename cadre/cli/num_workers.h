// How many workers `--nproc-per-node` means: a number, or auto, gpu or cpu of this machine.
//
// Threads: a pure function. Blocking: never. Errors: kInvalidArgument with the option. Source:
// torchrun.
#pragma once

#include "cadre/base/error.h"
#include "cadre/cli/option_words.h"
#include "cadre/os/proc/machine.h"

namespace cadre::cli {

// auto: the GPUs, or the cores where there is no GPU.
Result<int> num_workers_of(const GivenOption& given, const os::MachineInfo& machine);

}  // namespace cadre::cli
