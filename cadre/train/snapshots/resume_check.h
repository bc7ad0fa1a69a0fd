// What a resumed run may change in its configuration, and what it may not.
//
// Threads: plain functions. Blocking: never. Errors: kInvalidArgument with the key, the value of
// the snapshot and the present one, for a change that would spoil the result: data that was held
// out before and would now be learned from, or an optimizer that cannot read the states.
#pragma once

#include <string>
#include <vector>

#include "cadre/train/config/config.h"

namespace cadre::train {

// Sentences about what has changed, for the user to read; none when nothing has. The run's name,
// folder and run.resume do not count.
std::vector<std::string> check_resumed_config(const Config& before, const Config& now);

}  // namespace cadre::train
