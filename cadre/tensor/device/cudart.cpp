#include "cadre/tensor/device/cudart.h"

#include <dlfcn.h>

#include <atomic>

namespace cadre::device {
namespace {

constexpr int kRelaxedMode = 2;  // cudaStreamCaptureModeRelaxed

}  // namespace

void* cudart_function(const char* name) {
  void* symbol = dlsym(RTLD_DEFAULT, name);
  for (const char* const library : {"libcudart.so.13", "libcudart.so.12"}) {
    if (symbol != nullptr) break;
    void* const runtime = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    if (runtime != nullptr) symbol = dlsym(runtime, name);
  }
  return symbol;
}

// The runtime is loaded before there is an event of a CUDA device, so what is found does not
// change.
RelaxedCapture::Exchange RelaxedCapture::find_exchange() {
  static std::atomic<Exchange> found{nullptr};
  if (found == nullptr) {
    found = reinterpret_cast<Exchange>(cudart_function("cudaThreadExchangeStreamCaptureMode"));
  }
  return found;
}

RelaxedCapture::RelaxedCapture(c10::DeviceType type) {
  if (type != c10::DeviceType::CUDA) return;
  int mode = kRelaxedMode;
  const Exchange exchange = find_exchange();
  if (exchange == nullptr || exchange(&mode) != 0) return;
  exchange_ = exchange;
  mode_ = mode;
}

RelaxedCapture::~RelaxedCapture() {
  if (exchange_ != nullptr) static_cast<void>(exchange_(&mode_));
}

}  // namespace cadre::device
