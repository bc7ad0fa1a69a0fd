// How this host joins a job on several hosts: whether it is the first coordinator, at which address
// the other agents reach it, and the times that its agent keeps.
//
// Threads: any. Blocking: for the names of hosts, as resolve() in core/os/io/socket_address.h.
// Errors: kInvalidArgument or kUnavailable with a sentence that says what to change.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/os/socket.h"
#include "cadre/core/os/system.h"
#include "cadre/launch/hosts/host_agent.h"
#include "cadre/launch/hosts/registry.h"

namespace cadre::launch {

// The options of `cadre run` about the hosts of the job.
struct HostsSpec {
  // The address at which all agents look for the job: --rdzv-endpoint, or --master-addr and
  // --master-port. The agent that can listen there is the first coordinator. With a registry, the
  // address of its service; an empty host for a file.
  os::Address endpoint;
  // Where agents ask for the coordinator, instead of the endpoint.
  std::optional<RegistrySpec> registry;
  // The name or address at which the other hosts reach this one; empty: the address from which this
  // host's packets to the endpoint leave.
  std::string local_host;
  // is_host of --rdzv-conf: whether this host must be the one of the endpoint, or must not;
  // nullopt: the agent finds out.
  std::optional<bool> is_endpoint_host;
  // --node-rank of the static rendezvous; nullopt: the coordinator gives the ranks.
  std::optional<uint32_t> node_rank;
  size_t min_hosts = 1;
  size_t max_hosts = 1;
  os::Secret token;  // the secret of the job, which all its hosts have
  // The names of --rdzv-conf are those of torchrun.
  Duration join_timeout = std::chrono::seconds(600);
  Duration last_call_timeout = std::chrono::seconds(30);
  Duration keep_alive_interval = std::chrono::seconds(1);
  int keep_alive_max_attempt = 5;
  // Whether a job goes on with exactly half of its hosts, while the other half may still run.
  bool continues_with_half = false;
};

// What the agent of this host must know of the workers.
struct HostWorkers {
  std::string job;
  std::string role;
  uint32_t num_workers = 1;
  uint32_t max_restarts = 0;
  Duration stop_grace{};
};

// Begins to listen for other agents.
Result<HostAgentOptions> prepare_agent(os::System& system, const HostsSpec& spec,
                                       const HostWorkers& workers);

}  // namespace cadre::launch
