// A device for tests that needs no hardware: libtorch's PrivateUse1, named "late". The CPU's
// kernels compute on it, late, in one thread for each stream. Programs use it through c10's generic
// device interfaces, as they use CUDA. A program that is wrong on a GPU has a wrong value or a
// signal here:
//
// - Only events order two streams. A StreamHold makes the wrong order certain, and Delays make it
//   likely.
// - The host cannot access the memory of the device (SIGSEGV, EFAULT); see device_memory.h.
// - Freed memory is used again at once on its stream; see device_memory.h and pinned_memory.h.
// - A kernel that fails is reported by the next synchronisation of its stream.
// - Operators that this device cannot run throw in the caller; see kernel_call.h.
//
// Threads: any. Blocking: waits of the host end after kWaitLimit. Lifetime: the devices exist from
// register_device() until the process ends. When main() returns, the streams run what is enqueued,
// and a failure that no synchronisation reported is printed. A process forked after
// register_device() has no streams. Errors: c10::Error. Two ranks as threads need two device
// indices, because autograd has one thread for each index. For tests only. Source: PrivateUse1 of
// libtorch.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "cadre/testing/torch/late_device/counters.h"
#include "cadre/testing/torch/late_device/stream_queue.h"

namespace cadre::testing::late {

// Registers the devices with libtorch. The first call must precede the first backward of the
// process, because autograd starts its threads then. Later calls do nothing. Sets the number of
// intra-op threads of the process to 1, with which its streams compute.
void register_device();

c10::Device device(int index = 0);

// Sets the random delays of all streams, for kernels that are enqueued later.
void set_delays(const Delays& delays);

Counts counts(int device);

// Lets the allocations of memory of the device for which `fails` returns true throw
// c10::OutOfMemoryError, as if there was not enough memory; null takes that back. `fails` is called
// for each allocation, by one thread at a time.
void fail_allocations(int device, std::function<bool(size_t num_bytes)> fails);

// Waits for all streams of all devices, then throws the failure of one of them, if there is one.
void synchronize_all();

// Runs `task` on the stream, in its order, as a kernel.
void enqueue(const c10::Stream& stream, std::function<void()> task);

// Does the same for a stream that is given by its native handle, as libraries of a device's vendor
// take streams.
void enqueue_native(void* handle, std::function<void()> task);

// Returns the address by which a task on a stream accesses memory of a device.
void* host_address(const void* device_address);

// Holds a stream: nothing that is enqueued on it during the hold runs before release(). The host
// must not wait for the stream in between.
class StreamHold {
 public:
  explicit StreamHold(const c10::Stream& stream);
  ~StreamHold() { release(); }
  StreamHold(const StreamHold&) = delete;
  StreamHold& operator=(const StreamHold&) = delete;

  void release() { gate_->set(); }

 private:
  const std::shared_ptr<Event> gate_;
};

// While a StreamCapture exists, the stream says that it records a graph. What is enqueued on it
// runs as always. Has no effect with a version of torch that does not know captures.
class StreamCapture {
 public:
  explicit StreamCapture(const c10::Stream& stream);
  ~StreamCapture() { queue_.is_capturing = false; }
  StreamCapture(const StreamCapture&) = delete;
  StreamCapture& operator=(const StreamCapture&) = delete;

 private:
  StreamQueue& queue_;
};

}  // namespace cadre::testing::late
