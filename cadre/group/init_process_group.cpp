#include <utility>

#include "cadre/base/error.h"
#include "cadre/comm/connect.h"
#include "cadre/group/process_group.h"
#include "cadre/os/host/stderr_log.h"
#include "cadre/os/system.h"
#include "cadre/rendezvous/environment_rendezvous.h"
#include "cadre/rendezvous/job_environment.h"

namespace cadre {

namespace {

// What a launched process owns, in the order in which it is made; destroyed in reverse.
struct Job {
  std::unique_ptr<os::System> system;
  std::shared_ptr<LogSink> log;  // shared with the group
  Membership membership;
  std::unique_ptr<Communicator> communicator;
};

}  // namespace

ProcessGroup init_process_group(const InitOptions& options) {
  // Shared: the handle's copies own the job together.
  const auto job = std::make_shared<Job>();
  job->system = os::make_native_system();
  const Deadline deadline = job->system->deadline_in(options.connect_timeout);
  const JobEnvironment environment = read_job_environment().value_or_throw();
  job->log = std::make_shared<os::StderrLog>(environment.log_level, environment.rank);
  EnvironmentRendezvous rendezvous(*job->system, environment, job->log.get());
  job->membership = rendezvous.join(deadline).value_or_throw();
  CommunicatorOptions communicator_options{
      .timeout = options.timeout, .transport = options.transport, .log = job->log};
  communicator_options.flight_record_path =
      flight_record_path(environment, communicator_options.name, job->membership.round);
  job->communicator =
      Communicator::connect(*job->system, job->membership, communicator_options, deadline);
  return ProcessGroup(std::shared_ptr<Communicator>(job, job->communicator.get()));
}

}  // namespace cadre
