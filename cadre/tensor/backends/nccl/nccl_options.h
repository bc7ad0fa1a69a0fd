// The options of the engine that uses NCCL.
//
// Threads: plain values.
#pragma once

#include <string>

#include "cadre/core/base/types.h"

namespace cadre {

struct NcclOptions {
  // The path of the library. If empty, libnccl.so.2, which is that of a torch for CUDA.
  std::string library = {};
  // The type of the devices that the library works on; another one than CUDA is for tests only.
  DeviceType device_type = DeviceType::kCuda;
};

}  // namespace cadre
