// What libtorch has of the devices of one type, and the sentence for a user who has none.
//
// libcadre.so links libtorch_cpu.so only. The first search of a process loads the `libtorch.so` of
// the same torch, which loads the libraries of that build for its devices, such as
// libtorch_cuda.so.
//
// The first search must precede the first call of the process that asks libtorch for CUDA
// (torch::manual_seed(), torch::cuda::is_available(), pinned tensors) and the first backward:
// libtorch looks for CUDA once, and autograd starts its threads once. A search that came after such
// a call finds no devices, and the reason names the calls. A search after a backward is not
// recognised: the next backward on a device fails in libtorch.
//
// Threads: any. Blocking: the first search reads the libraries, up to 0.5 GB, from disk. Errors:
// none; everything that is missing is part of the reason. A process that has searched for CUDA
// devices must not be forked to use them.
#pragma once

#include <c10/core/DeviceType.h>

#include <string>
#include <vector>

namespace c10::impl {
struct DeviceGuardImplInterface;
}

namespace cadre::device {

struct DeviceFacts {
  c10::DeviceType type = c10::DeviceType::CPU;
  std::string torch_folder;  // that of libc10.so
  std::string load_failure;  // why libtorch.so could not be loaded; empty if it was
  // The guard that the type's library has registered with c10, or null.
  const c10::impl::DeviceGuardImplInterface* guard = nullptr;
  // False if libtorch looked for CUDA before its library was loaded. It does not look again.
  bool is_known_to_aten = true;
  int num_devices = 0;
};

DeviceFacts search_devices(c10::DeviceType type);

// Returns the types of devices whose library is loaded now, and searches for none.
std::vector<c10::DeviceType> loaded_device_types();

// Returns a sentence that says why there is no device; empty if there is one.
std::string why_none(const DeviceFacts& facts);

}  // namespace cadre::device
