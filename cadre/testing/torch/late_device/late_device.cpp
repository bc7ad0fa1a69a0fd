#include "cadre/testing/torch/late_device/late_device.h"

#include <ATen/Parallel.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>

#include <array>
#include <exception>
#include <memory>
#include <utility>

#include "cadre/testing/torch/late_device/runtime.h"

namespace cadre::testing::late {
namespace {

// c10's guards read and write the current device and streams of the calling thread.
struct Current {
  int device = 0;
  std::array<int, kNumDevices> streams{};
};
Current& current() {
  thread_local Current of_thread;  // c10's interface has no object that could own it
  return of_thread;
}

// Registers at its construction. Joins the threads of the streams when the process exits.
class Registration {
 public:
  Registration() {
    at::set_num_threads(1);
    c10::register_privateuse1_backend("late");
    c10::SetAllocator(kLateType, &runtime().allocator);
    at::setHostAllocator(kLateType, &runtime().pinned);
    register_guard_and_hooks();
    register_kernels();
    register_autocast();
  }
  ~Registration() { runtime().streams.close(); }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;
};

}  // namespace

Runtime& runtime() {
  static Runtime& of_process = *std::make_unique<Runtime>().release();  // see runtime.h
  return of_process;
}

int current_device() {
  return current().device;
}

int exchange_device(int device) {
  return std::exchange(current().device, device);
}

int current_stream(int device) {
  return current().streams.at(static_cast<size_t>(device));
}

int exchange_stream(int device, int stream) {
  return std::exchange(current().streams.at(static_cast<size_t>(device)), stream);
}

StreamQueue& current_queue(int device) {
  return runtime().streams.get(device, current_stream(device));
}

StreamQueue& queue_of(const c10::Stream& stream) {
  return runtime().streams.get(stream.device_index(), static_cast<int>(stream.id()));
}

void register_device() {
  static const Registration once;  // libtorch's registries have no object that could own it
}

c10::Device device(int index) {
  return late_device_of(index);
}

void set_delays(const Delays& delays) {
  runtime().streams.set_delays(delays);
}

Counts counts(int device) {
  return runtime().counters.counts(device);
}

void fail_allocations(int device, std::function<bool(size_t num_bytes)> fails) {
  runtime().allocator.fail_allocations(device, std::move(fails));
}

void synchronize_all() {
  std::exception_ptr failure;
  for (int index = 0; index < kNumDevices; ++index) {
    try {
      runtime().streams.synchronize(index);
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void enqueue(const c10::Stream& stream, std::function<void()> task) {
  runtime().counters.add_kernel(stream.device_index());
  queue_of(stream).enqueue(std::move(task), StreamQueue::TaskKind::kKernel);
}

void enqueue_native(void* handle, std::function<void()> task) {
  auto* const queue = static_cast<StreamQueue*>(handle);
  runtime().counters.add_kernel(queue->device());
  queue->enqueue(std::move(task), StreamQueue::TaskKind::kKernel);
}

void* host_address(const void* device_address) {
  return runtime().memory.host_address(device_address);
}

StreamCapture::StreamCapture(const c10::Stream& stream) : queue_(queue_of(stream)) {
  queue_.is_capturing = true;
}

StreamHold::StreamHold(const c10::Stream& stream) : gate_(std::make_shared<Event>(nullptr)) {
  queue_of(stream).wait_event(gate_);
}

}  // namespace cadre::testing::late
