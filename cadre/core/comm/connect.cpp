#include "cadre/core/comm/connect.h"

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/private_folder.h"
#include "cadre/core/os/host/stderr_log.h"
#include "cadre/core/rendezvous/environment_rendezvous.h"
#include "cadre/core/rendezvous/job_environment.h"

namespace cadre {
namespace {

// Returns the path of the flight record, and creates its folder as `cadre run` does. If that fails,
// the file cannot be created either, and the recorder reports why.
std::string flight_record_path(const JobEnvironment& environment, std::string_view group,
                               uint64_t round) {
  if (environment.flight_folder.empty()) return "";
  static_cast<void>(os::make_private_folder(environment.flight_folder));
  return format("{}/{}-round{}-rank{}.flight", environment.flight_folder, group, round,
                environment.rank);
}

}  // namespace

std::unique_ptr<Communicator> connect_from_environment(os::System& system,
                                                       const CommunicatorOptions& options,
                                                       Deadline deadline) {
  return connect_from_environment(system, JobPlace{}, options, deadline);
}

std::unique_ptr<Communicator> connect_from_environment(os::System& system, const JobPlace& place,
                                                       const CommunicatorOptions& options,
                                                       Deadline deadline) {
  const JobEnvironment environment = read_job_environment(place).value_or_throw();
  CommunicatorOptions completed = options;
  if (!completed.log) {
    completed.log = std::make_shared<os::StderrLog>(environment.log_level, environment.rank);
  }
  EnvironmentRendezvous rendezvous(system, environment, completed.log.get());
  Membership membership = rendezvous.join(deadline).value_or_throw();
  // The launcher does not know how a program numbers its ranks itself.
  if (!place.rank) membership.lost_ranks = lost_ranks_from_launcher(membership.world_size);
  if (completed.flight_record_path.empty()) {
    completed.flight_record_path =
        flight_record_path(environment, completed.name, membership.round);
  }
  if (completed.tuning_file.empty()) completed.tuning_file = environment.tuning_file;
  return Communicator::connect(system, membership, completed, deadline);
}

}  // namespace cadre
