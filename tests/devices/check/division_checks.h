// Checks of modules that are divided between the processes of a world, which may share one device.
// The truth is one process on the CPU.
//
// Threads: one. Blocking: until all ranks have called.
#pragma once

#include "cadre/tensor/group/process_group.h"
#include "check.h"

namespace cadre::device_check {

Finding check_fsdp(const Check& check, const ProcessGroup& world);
Finding check_tensor_parallel(const Check& check, const ProcessGroup& world);
Finding check_pipeline(const Check& check, const ProcessGroup& world);
// Compares plans with the most that tensors of the device use in a step.
Finding check_memory_plan(const Check& check, const ProcessGroup& world);

}  // namespace cadre::device_check
