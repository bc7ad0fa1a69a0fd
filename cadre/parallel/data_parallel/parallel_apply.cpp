#include "cadre/parallel/data_parallel/parallel_apply.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/system.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/tensor/group/caught_error.h"
#include "cadre/tensor/hooks/autocast.h"
#include "cadre/tensor/hooks/operations/own_generator.h"

namespace cadre::data_parallel {
namespace {

// The number from which the seeds of all replicas of one call are derived. It is drawn when the
// first replica draws, so that a module without random numbers leaves the default generator as it
// is.
class CommonSeed {
 public:
  at::Generator generator_of(size_t replica) {
    std::call_once(drawn_, [&] {
      at::Generator source = at::detail::getDefaultCPUGenerator();
      const std::lock_guard<std::mutex> lock(source.mutex());
      seed_ = at::check_generator<at::CPUGeneratorImpl>(source)->random64();
    });
    // The constant is that of SplitMix64, whose sequence these are.
    return at::make_generator<at::CPUGeneratorImpl>(seed_ + replica * 0x9e3779b97f4a7c15);
  }

 private:
  std::once_flag drawn_;
  uint64_t seed_ = 0;
};

std::optional<c10::Stream> current_stream(const c10::Device& device) {
  if (device.is_cpu()) return std::nullopt;
  const auto found = device::find_devices(device.type());
  if (!found.runtime) {
    throw Error(ErrorCode::kUnavailable,
                format("DataParallel: a device is {}: {}", device.str(), found.reason));
  }
  return found.runtime->current_stream(device);
}

class ReplicaRun {
 public:
  ReplicaRun(std::span<const c10::Device> devices, const std::function<void(size_t)>& body)
      : devices_(devices), body_(body), errors_(devices.size()) {
    const auto on_cpu = [](const c10::Device& device) { return device.is_cpu(); };
    const auto num_on_cpu = static_cast<int>(std::ranges::count_if(devices, on_cpu));
    if (num_on_cpu > 1) num_threads_ = std::max(num_threads_before_ / num_on_cpu, 1);
    for (const c10::Device& device : devices) streams_.push_back(current_stream(device));
  }

  void run() {
    const auto system = os::make_native_system();
    std::vector<std::unique_ptr<os::Thread>> threads;
    try {
      for (size_t i = 1; i < devices_.size(); ++i) {
        threads.push_back(system->spawn(format("replica{}", i), [this, i] {
          const at::ThreadLocalStateGuard state(state_);
          autocast_.restore();
          run_replica(i);
        }));
      }
      run_replica(0);
    } catch (...) {
      for (const auto& thread : threads) thread->join();
      at::set_num_threads(num_threads_before_);
      throw;
    }
    for (const auto& thread : threads) thread->join();
    at::set_num_threads(num_threads_before_);
    throw_first();
  }

 private:
  void run_replica(size_t i) {
    try {
      at::set_num_threads(num_threads_);
      const c10::OptionalStreamGuard stream(streams_[i]);
      const wrap::OwnGenerator generator([this, i] { return seed_.generator_of(i); });
      body_(i);
    } catch (...) {
      errors_[i] = caught_error();
    }
  }

  void throw_first() const {
    for (size_t i = 0; i < errors_.size(); ++i) {
      if (!errors_[i]) continue;
      throw errors_[i]->with_context(
          format("DataParallel: replica {} of {} on {}", i, errors_.size(), devices_[i].str()));
    }
  }

  const std::span<const c10::Device> devices_;
  const std::function<void(size_t)>& body_;
  const at::ThreadLocalState state_;
  const wrap::AutocastState autocast_;
  const int num_threads_before_ = at::get_num_threads();
  int num_threads_ = num_threads_before_;
  std::vector<std::optional<c10::Stream>> streams_;
  CommonSeed seed_;
  std::vector<std::optional<Error>> errors_;
};

}  // namespace

void run_replicas(std::span<const c10::Device> devices, const std::function<void(size_t)>& body) {
  if (devices.size() == 1) return body(0);
  ReplicaRun(devices, body).run();
}

}  // namespace cadre::data_parallel
