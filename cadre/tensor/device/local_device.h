// The device of this process when each process of a job uses one device.
//
// Threads: any. Blocking: as find_devices(), in the first call. Errors: kInvalidArgument if
// LOCAL_RANK is no number; c10::Error for what the driver reports.
// Source: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) of PyTorch's programs.
#pragma once

#include <c10/core/Device.h>

#include "cadre/core/base/export.h"

namespace cadre {

// Returns cuda:LOCAL_RANK and makes it the current device of this thread; cuda:0 without
// LOCAL_RANK. If there are fewer devices than processes on this host, they share the devices in
// turn. Returns the CPU if there is no CUDA device. Call it, or init_process_group(), before other
// functions of libtorch: some of them decide for the whole process whether there is CUDA
// (tensor/device/device_search.h). Throws kUnavailable if one of them came first.
CADRE_EXPORT c10::Device local_device();

namespace device {

// Does the same for a program that has not asked for a device: where local_device() throws
// kUnavailable, returns the CPU, because the program may have been written for it.
c10::Device default_device();

}  // namespace device
}  // namespace cadre
