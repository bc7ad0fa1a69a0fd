// What the library libcadre_fake_nccl.so takes and gives beside the functions of NCCL.
#pragma once

#include "cadre/testing/torch/fake_nccl/fake_nccl.h"

namespace cadre::testing::fake_nccl {

// The device on whose streams the library works.
struct DeviceFunctions {
  // Runs task(argument) on the stream, in its order.
  void (*enqueue)(void* stream, void (*task)(void* argument), void* argument) = nullptr;
  // Returns the address by which a task accesses memory of the device.
  void* (*host_address)(const void* address) = nullptr;
};

extern "C" {
using AttachFunction = void (*)(const DeviceFunctions* functions);
using SetFaultsFunction = void (*)(const Faults* faults);
using GetCountsFunction = void (*)(Counts* counts);
using FirstMisuseFunction = const char* (*)();
}

}  // namespace cadre::testing::fake_nccl
