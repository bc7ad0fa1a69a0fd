// Compares the configuration of a resumed run with that of its snapshot.
//
// Threads: plain functions. Blocking: never. Errors: kInvalidArgument for a change that would
// invalidate the result: training on data that was held out, or an optimizer that cannot read the
// saved states. The message has the key, the value of the snapshot and the present one.
#pragma once

#include <string>
#include <vector>

#include "cadre/train/trainer/config/config.h"

namespace cadre::train {

// Returns messages for the user about keys that have changed; an empty list if none has. Ignores
// run.name, run.folder, run.resume and run.recovery, and keys that have no effect in either
// configuration.
std::vector<std::string> check_resumed_config(const Config& before, const Config& now);

}  // namespace cadre::train
