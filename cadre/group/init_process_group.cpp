#include <memory>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/comm/connect.h"
#include "cadre/group/process_group.h"
#include "cadre/os/system.h"

namespace cadre {

namespace {

// What a launched process owns, in the order in which it is made; destroyed in reverse.
struct Job {
  std::unique_ptr<os::System> system;
  std::unique_ptr<Communicator> communicator;
};

}  // namespace

ProcessGroup init_process_group(const InitOptions& options) {
  if (options.timeout <= Duration(0) || options.connect_timeout <= Duration(0)) {
    throw Error(ErrorCode::kInvalidArgument,
                "init_process_group: a timeout of InitOptions is not positive; pass a positive "
                "one, or leave it out for the default");
  }
  // Shared: the handle's copies own the job together.
  const auto job = std::make_shared<Job>();
  job->system = os::make_native_system();
  job->communicator = connect_from_environment(
      *job->system, {.timeout = options.timeout, .transport = options.transport},
      job->system->deadline_in(options.connect_timeout));
  return ProcessGroup(std::shared_ptr<Communicator>(job, job->communicator.get()));
}

}  // namespace cadre
