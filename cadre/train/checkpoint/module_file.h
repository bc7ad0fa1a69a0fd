// A module's parameters and buffers in one safetensors file.
//
// Threads: one at a time for a module. Blocking: reads and writes a disk. Errors: cadre::Error;
// load() names the first tensor that is missing, unknown or of another shape or dtype, and leaves
// the module unchanged. Source: torch::save and torch::load.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace torch::nn {
class Module;
}

namespace cadre {

// Returns the parameters, then the buffers, by their full names. The tensors share the module's
// memory.
CADRE_EXPORT std::vector<NamedTensor> named_state(const torch::nn::Module& module);

// Writes a temporary file with a unique name and renames it to `path`, so `path` is never
// incomplete. If several ranks write it, the file of the last rename stays, never a mixture. Like
// load(), throws kInvalidArgument for a parameter that is a shard, as after parallelize_module().
CADRE_EXPORT void save(const torch::nn::Module& module, const std::string& path);
// Fills the module in place.
CADRE_EXPORT void load(torch::nn::Module& module, const std::string& path);

// Holds for wrappers such as DistributedDataParallel, which are no modules but contain one.
template <typename Given>
concept ModuleWrapper = requires(const Given& wrapper) { wrapper.module(); };

template <typename Given>
inline constexpr bool kIsModule = !ModuleWrapper<Given>;

template <ModuleWrapper Given>
void save(const Given&, const std::string&) {
  static_assert(kIsModule<Given>,
                "cadre::save(module, path): pass the wrapped module, model.module()");
}
template <ModuleWrapper Given>
void load(const Given&, const std::string&) {
  static_assert(kIsModule<Given>,
                "cadre::load(module, path): pass the wrapped module, model.module()");
}

// These overloads do the same for a module holder (torch::nn::Sequential) or a std::shared_ptr to a
// module.
template <typename Pointer>
  requires requires(const Pointer& module) { *module; }
void save(const Pointer& module, const std::string& path) {
  save(*module, path);
}
template <typename Pointer>
  requires requires(Pointer& module) { *module; }
void load(Pointer&& module, const std::string& path) {
  load(*module, path);
}

}  // namespace cadre
