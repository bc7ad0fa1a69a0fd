// What the trainer does on a device. Whatever works on the CPU only is refused here, by its key.
//
// Threads: pure functions. Errors: kInvalidArgument with the key to change.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "cadre/train/trainer/config/config.h"

namespace cadre::train {

// Returns "cpu", "cuda" or "privateuseone".
std::string type_name(const c10::Device& device);

// Returns why a run of the configuration cannot use the device; an empty text if it can.
std::string problem_on(const Config& config, const c10::Device& device);
// Throws for such a problem.
void check_device(const Config& config, const c10::Device& device);

}  // namespace cadre::train
