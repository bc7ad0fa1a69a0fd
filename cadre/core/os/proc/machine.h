// What this process may use of the machine, by its own limits and those of its container.
//
// Threads: any. Blocking: never. Errors: none; a value that cannot be read is nullopt.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cadre/core/os/proc/environment.h"

namespace cadre::os {

struct MachineInfo {
  std::string host_name;
  std::string kernel;
  std::string cpu_model;
  int num_cores = 1;  // the number of cores that this process may run on
  int num_gpus = 0;   // counts NVIDIA's device files that CUDA_VISIBLE_DEVICES selects
  uint64_t total_memory_bytes = 0;
  uint64_t available_memory_bytes = 0;
  // nullopt means that there is no limit.
  std::optional<uint64_t> max_open_files;
  std::optional<uint64_t> max_locked_bytes;
  std::optional<uint64_t> cgroup_memory_bytes;
  std::optional<double> cgroup_cores;
};

// Returns the number of GPUs among the device files of `folder` that CUDA_VISIBLE_DEVICES leaves
// visible, by CUDA's rules: the list ends before the first entry that is no device of this machine,
// and a list that names a device twice leaves none.
int count_gpus(const std::string& folder, const std::optional<std::string>& visible_devices);

MachineInfo read_machine_info(const Environment& environment);

// Returns how many processes the kernel has killed since the machine started because the memory of
// the machine or of a container was exhausted; 0 if the kernel has no such counter. Source:
// oom_kill of /proc/vmstat, which any user may read.
uint64_t count_memory_kills();

}  // namespace cadre::os
