#include "cadre/core/rendezvous/environment_rendezvous.h"

#include "cadre/core/rendezvous/file_rendezvous.h"
#include "cadre/core/rendezvous/tcp_rendezvous.h"

namespace cadre {

Result<Membership> EnvironmentRendezvous::join(Deadline deadline) {
  // A job that was started again, after a failure or because hosts came or went, finds keys from
  // before in a store that outlives its processes, such as a file. Each key contains the round,
  // which every rejoin() increments. Each attempt begins so many rounds later that its keys never
  // coincide with earlier ones.
  constexpr uint64_t kRoundsPerAttempt = 1'000'000;
  const uint64_t round = static_cast<uint64_t>(environment_.attempt) * kRoundsPerAttempt;
  if (!environment_.store_file.empty()) {
    FileRendezvous rendezvous(system_, {.path = environment_.store_file,
                                        .rank = environment_.rank,
                                        .world_size = environment_.world_size,
                                        .job_token = environment_.job_token,
                                        .round = round,
                                        .log = log_});
    return rendezvous.join(deadline);
  }
  TcpRendezvous rendezvous(system_, {.address = {os::Address::Kind::kTcp, environment_.master_addr,
                                                 environment_.master_port},
                                     .rank = environment_.rank,
                                     .world_size = environment_.world_size,
                                     .job_token = environment_.job_token,
                                     .protocol = environment_.store_protocol,
                                     .may_host_store = !environment_.uses_agent_store,
                                     .round = round,
                                     .log = log_});
  return rendezvous.join(deadline);
}

}  // namespace cadre
