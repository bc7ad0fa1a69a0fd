#include <chrono>
#include <memory>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/connect.h"
#include "cadre/core/comm/group_destruction.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/job_environment.h"
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
             "leave it out: collectives run on CPUs, over shared memory or TCP",
             backend));
}

}  // namespace

ProcessGroup init_process_group(const InitOptions& options) {
  check_positive("timeout", options.timeout);
  check_positive("connect_timeout", options.connect_timeout);
  const TransportChoice transport = transport_of(options.backend);
  auto job = std::make_unique<Job>();
  job->system = os::make_native_system();
  job->communicator = connect_from_environment(
      *job->system,
      JobPlace{.rank = options.rank,
               .world_size = options.world_size,
               .init_method = options.init_method},
      {.timeout = options.timeout, .transport = transport, .tuning_file = options.tuning_file},
      job->system->deadline_in(options.connect_timeout));
  return ProcessGroup(share_group(std::move(job)));  // copies of the handle share the job
}

}  // namespace cadre
