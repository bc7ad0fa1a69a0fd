// The devices of one type in this process, such as all CUDA devices, through c10's generic
// interfaces: nothing of CUDA is linked.
//
// A DeviceRuntime is a value without state of its own. Streams are c10's.
//
// Threads: any; the current device and the current streams belong to the calling thread, as in
// libtorch. Blocking: find_devices(), as it says, and the first stream or memory() of a CUDA
// device, which makes the device's context (up to a second). Lifetime: guards and streams exist
// until the process ends. Errors: kInvalidArgument for a device or stream of another type, and for
// an index that no device has; c10::Error for what the driver reports.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "cadre/core/base/export.h"

namespace at {
struct HostAllocator;
}
namespace c10::impl {
struct DeviceGuardImplInterface;
}

namespace cadre::device {

enum class StreamPriority : uint8_t { kNormal, kHigh };

// Bytes of one device. What other processes use is part of total - free only.
struct DeviceMemory {
  size_t total_bytes = 0;
  size_t free_bytes = 0;
  size_t reserved_bytes = 0;        // held by libtorch's allocator of this process
  size_t allocated_bytes = 0;       // of these, in tensors
  size_t peak_reserved_bytes = 0;   // largest reserved_bytes since the start or reset_peaks()
  size_t peak_allocated_bytes = 0;  // largest allocated_bytes since the start or reset_peaks()
};

struct FoundDevices;

class CADRE_EXPORT DeviceRuntime {
 public:
  c10::DeviceType type() const;
  int num_devices() const;
  c10::Device current_device() const;
  void make_current(c10::Device device) const;

  c10::Stream current_stream(c10::Device device) const;
  // Returns a stream of libtorch's pool. The pool has a fixed number of streams, so two calls may
  // return the same one.
  c10::Stream pooled_stream(c10::Device device, StreamPriority priority) const;
  // Returns the driver's handle of the stream, for example a cudaStream_t. libtorch owns it.
  // Throws kInvalidArgument with a version of torch that does not give it.
  void* native_handle(const c10::Stream& stream) const;
  // Says whether the stream records a graph. Events of it must not be queried then. Returns false
  // with a version of torch that cannot say.
  bool is_capturing(const c10::Stream& stream) const;

  // The statistics of libtorch's allocator are 0 before the first tensor of the process.
  DeviceMemory memory(c10::Device device) const;
  void reset_peaks(c10::Device device) const;

  // Allocator of pinned host memory; null if this type of device has none. Memory that a stream
  // reads or writes is announced to its record_event() before it is freed.
  at::HostAllocator* pinned_allocator() const;

 private:
  friend FoundDevices find_devices(c10::DeviceType type);
  explicit DeviceRuntime(const c10::impl::DeviceGuardImplInterface& guard) : guard_(&guard) {}
  void check_device(c10::Device device) const;
  void check_stream(const c10::Stream& stream) const;

  const c10::impl::DeviceGuardImplInterface* guard_;
};

struct FoundDevices {
  std::optional<DeviceRuntime> runtime;  // nullopt if there is no device
  std::string reason;                    // why there is no device; empty if there is one
  bool was_late = false;                 // there may be devices, but the search came too late
};

// Says whether the stream of the device that is current in this thread records a graph.
bool is_capture_current(c10::Device device);

// Finds the devices of a type. The first call of a process loads libtorch.so and must precede some
// calls of libtorch; device_search.h lists them. Never throws because a device, a driver or a
// library is absent.
CADRE_EXPORT FoundDevices find_devices(c10::DeviceType type);

}  // namespace cadre::device
