// The state of the late devices of this process, and the device and streams that are current in a
// thread.
//
// libtorch keeps pointers to allocators, guards and kernels until the process ends, so there is one
// state for each process, and it is not destroyed.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>

#include "cadre/testing/torch/late_device/counters.h"
#include "cadre/testing/torch/late_device/device_memory.h"
#include "cadre/testing/torch/late_device/pinned_memory.h"
#include "cadre/testing/torch/late_device/stream_queue.h"

namespace cadre::testing::late {

inline constexpr c10::DeviceType kLateType = c10::DeviceType::PrivateUse1;

inline c10::Device late_device_of(int index) {
  return {kLateType, static_cast<c10::DeviceIndex>(index)};
}

struct Runtime {
  Counters counters;
  StreamTable streams;
  MappedMemory memory;
  DeviceAllocator allocator{memory, streams};
  PinnedAllocator pinned{streams};
};

Runtime& runtime();

// Index of the device that is current in this thread, and its change.
int current_device();
int exchange_device(int device);
// Id of the stream that is current on the device in this thread, and its change.
int current_stream(int device);
int exchange_stream(int device, int stream);
// Queue of the stream that is current on the device in this thread.
StreamQueue& current_queue(int device);
StreamQueue& queue_of(const c10::Stream& stream);

// Parts of the registration, each called once by register_device().
void register_guard_and_hooks();
void register_kernels();
void register_autocast();

}  // namespace cadre::testing::late
