// Functions of the CUDA runtime that libtorch has loaded. Nothing of CUDA is linked.
//
// Threads: any. Blocking: never. Errors: none; without a CUDA runtime nothing is done.
#pragma once

#include <c10/core/DeviceType.h>

namespace cadre::device {

// Returns the address of a function such as "cudaDeviceGetPCIBusId"; null if this process has no
// CUDA runtime.
void* cudart_function(const char* name);

// While a RelaxedCapture exists, calls of this thread such as a query of an event are allowed while
// another thread captures a graph in CUDA's global mode, which is torch's default. Otherwise such a
// call fails, and invalidates the capture. Does nothing for devices that are not CUDA's. Source:
// cudaThreadExchangeStreamCaptureMode.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(c10::DeviceType type);
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  using Exchange = int (*)(int* mode);

  static Exchange find_exchange();

  Exchange exchange_ = nullptr;
  int mode_ = 0;  // the mode of this thread outside
};

}  // namespace cadre::device
