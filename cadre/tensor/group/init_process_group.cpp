#include <chrono>
#include <memory>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/connect.h"
#include "cadre/core/comm/group_destruction.h"
#include "cadre/core/os/system.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

namespace {

// What a launched process owns, in the order in which it is made; destroyed in reverse.
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

}  // namespace

ProcessGroup init_process_group(const InitOptions& options) {
  check_positive("timeout", options.timeout);
  check_positive("connect_timeout", options.connect_timeout);
  auto job = std::make_unique<Job>();
  job->system = os::make_native_system();
  job->communicator = connect_from_environment(
      *job->system, {.timeout = options.timeout, .transport = options.transport},
      job->system->deadline_in(options.connect_timeout));
  return ProcessGroup(share_group(std::move(job)));  // the handle's copies own the job together
}

}  // namespace cadre
