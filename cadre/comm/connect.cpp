#include "cadre/comm/connect.h"

#include "cadre/rendezvous/environment_rendezvous.h"
#include "cadre/rendezvous/job_environment.h"

namespace cadre {

std::unique_ptr<Communicator> connect_from_environment(os::System& system,
                                                       const CommunicatorOptions& options,
                                                       Deadline deadline) {
  EnvironmentRendezvous rendezvous(system, read_job_environment().value_or_throw(), options.log);
  const Membership membership = rendezvous.join(deadline).value_or_throw();
  return Communicator::connect(system, membership, options, deadline);
}

}  // namespace cadre
