// A module's parameters and buffers in one safetensors file.
//
// Threads: one at a time for a module. Blocking: for the time of the disk.
// Errors: cadre::Error; load() names the first tensor that is missing, unknown or of another shape
// or dtype, and leaves the module as it was. Source: torch::save and torch::load.
#pragma once

#include <string>

#include "cadre/base/export.h"
#include "cadre/checkpoint/safetensors.h"

namespace torch::nn {
class Module;
}

namespace cadre {

// The parameters, then the buffers, by their full names. They share the module's memory.
CADRE_EXPORT NamedTensors named_state(const torch::nn::Module& module);

// Writes a temporary file and renames it, so that `path` is never half a file.
CADRE_EXPORT void save(const torch::nn::Module& module, const std::string& path);
// Fills the module in place.
CADRE_EXPORT void load(torch::nn::Module& module, const std::string& path);

}  // namespace cadre
