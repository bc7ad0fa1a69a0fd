#include <chrono>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/connect.h"
#include "cadre/core/comm/group_destruction.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/job_environment.h"
#include "cadre/tensor/backends/device_engine.h"
#include "cadre/tensor/device/core_device.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/tensor/device/local_device.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

namespace {

// The objects that a process of a job owns, in the order of their construction. They are destroyed
// in reverse.
struct Job {
  std::unique_ptr<os::System> system;
  std::unique_ptr<Communicator> communicator;
};

void check_positive(std::string_view field, Duration timeout) {
  if (timeout > Duration(0)) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      format("init_process_group: InitOptions::{} is {} ms; pass a positive one, or leave "
             "it out for the default",
             field, std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count()));
}

TransportChoice transport_of(std::string_view backend) {
  if (backend.empty() || backend == "gloo") return TransportChoice::kAuto;
  if (backend == "host") return TransportChoice::kSharedMemory;
  if (backend == "net") return TransportChoice::kTcp;
  throw Error(
      ErrorCode::kInvalidArgument,
      format("init_process_group: InitOptions::backend is \"{}\"; pass \"host\" or \"net\", or "
             "leave it out. On CPUs collectives run over shared memory or TCP. For tensors of CUDA "
             "devices NCCL is chosen by itself, and InitOptions::device_engine demands it",
             backend));
}

// Returns the engine for memory of the device; nullopt for the CPU.
std::optional<DeviceBackend> device_backend_of(const InitOptions& options, const JobPlace& place) {
  c10::Device device = options.device ? *options.device : device::default_device();
  if (device.is_cpu()) {
    if (options.device_engine == DeviceEngineChoice::kAuto || options.device) return std::nullopt;
    throw Error(ErrorCode::kUnavailable,
                format("init_process_group: InitOptions::device_engine demands an engine for a "
                       "device, and {}; leave it out to run on the CPU",
                       device::find_devices(c10::DeviceType::CUDA).reason));
  }
  if (!device::to_core(device)) {
    throw Error(ErrorCode::kInvalidArgument,
                format("init_process_group: InitOptions::device is {}; pass a device of CUDA or of "
                       "PrivateUse1, or torch::kCPU",
                       device.str()));
  }
  const device::FoundDevices found = device::find_devices(device.type());
  if (!found.runtime) {
    throw Error(ErrorCode::kUnavailable, format("init_process_group: InitOptions::device is {}: {}",
                                                device.str(), found.reason));
  }
  // A device without an index is the current one, as in torch.
  if (!device.has_index()) device = found.runtime->current_device();
  const std::optional<Device> known = device::to_core(device);
  found.runtime->make_current(device);
  const JobEnvironment environment = read_job_environment(place).value_or_throw();
  return DeviceBackend{
      .device = *known,
      .make = device_engine(options.device_engine, {.library = environment.nccl_library})};
}

}  // namespace

ProcessGroup init_process_group(const InitOptions& options) {
  check_positive("timeout", options.timeout);
  check_positive("connect_timeout", options.connect_timeout);
  const TransportChoice transport = transport_of(options.backend);
  const JobPlace place{
      .rank = options.rank, .world_size = options.world_size, .init_method = options.init_method};
  const std::optional<DeviceBackend> device_backend = device_backend_of(options, place);
  auto job = std::make_unique<Job>();
  job->system = os::make_native_system();
  job->communicator = connect_from_environment(*job->system, place,
                                               {.timeout = options.timeout,
                                                .transport = transport,
                                                .device_backend = device_backend,
                                                .tuning_file = options.tuning_file},
                                               job->system->deadline_in(options.connect_timeout));
  return ProcessGroup(share_group(std::move(job)));  // copies of the handle share the job
}

}  // namespace cadre
