// What the machine, its limits and its container give to this process.
//
// Threads: any. Blocking: never. Errors: what cannot be read is absent.
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
  int num_cores = 1;  // that this process may run on
  int num_gpus = 0;   // NVIDIA's device files, or what CUDA_VISIBLE_DEVICES leaves of them
  uint64_t total_memory_bytes = 0;
  uint64_t available_memory_bytes = 0;
  // Absent: unlimited.
  std::optional<uint64_t> max_open_files;
  std::optional<uint64_t> max_locked_bytes;
  std::optional<uint64_t> cgroup_memory_bytes;
  std::optional<double> cgroup_cores;
};

// The GPUs among the device files of `folder` that CUDA_VISIBLE_DEVICES leaves visible, by CUDA's
// rules: the list ends before the first entry that is no device of this machine, and a device named
// twice leaves none.
int count_gpus(const std::string& folder, const std::optional<std::string>& visible_devices);

MachineInfo read_machine_info(const Environment& environment);

}  // namespace cadre::os
