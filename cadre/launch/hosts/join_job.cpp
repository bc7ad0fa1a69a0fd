#include "cadre/launch/hosts/join_job.h"

#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/interfaces.h"
#include "cadre/core/os/io/socket_address.h"

namespace cadre::launch {
namespace {

// The time after the grace period in which processes that were killed end.
constexpr Duration kKillTime = std::chrono::seconds(10);

// The time in which a registry has to answer when the agent starts.
constexpr Duration kFirstAnswerTime = std::chrono::seconds(30);
// An address that no host has (RFC 5737), so the route to it is the default route.
constexpr std::string_view kAnywhere = "192.0.2.1";

// Returns the address from which packets to other networks leave, or that of another interface.
std::string default_host() {
  const auto resolved = os::resolve({os::Address::Kind::kTcp, std::string(kAnywhere), 9});
  if (resolved.ok() && !resolved->empty()) {
    const auto source = os::source_towards(resolved->front());
    if (source && !source->is_loopback) return source->host;
  }
  for (const os::InterfaceAddress& own : os::interface_addresses()) {
    if (!own.is_loopback && !own.is_link_local) return own.host;
  }
  return "127.0.0.1";
}

// Returns the host at which other hosts reach this one.
Result<std::string> find_local_host(const HostsSpec& spec) {
  if (!spec.local_host.empty()) return spec.local_host;
  if (spec.endpoint.host.empty()) return default_host();
  const auto resolved = os::resolve(spec.endpoint);
  if (!resolved.ok()) {
    return resolved.error().with_context(
        cadre::format("the endpoint of the job, \"{}\"", spec.endpoint.host_and_port()));
  }
  for (const os::SocketAddress& target : *resolved) {
    const auto source = os::source_towards(target);
    if (!source) continue;
    if (!source->is_loopback || spec.endpoint.host == "localhost" ||
        spec.endpoint.host == source->host) {
      return source->host;
    }
    // The endpoint is a name of this host that leads to loopback, as in Debian's /etc/hosts.
    for (const os::InterfaceAddress& own : os::interface_addresses()) {
      if (!own.is_loopback && !own.is_link_local) return own.host;
    }
    return source->host;
  }
  return Error(ErrorCode::kUnavailable,
               cadre::format("no network interface of this host leads to the endpoint of the job, "
                             "{}; check the address, or name this host's own with --local-addr",
                             spec.endpoint.host_and_port()));
}

// Listens at the endpoint if it is on this host and no other agent does; null if it is elsewhere or
// taken, or if it is that of a registry.
Result<std::unique_ptr<os::Listener>> listen_at_endpoint(os::System& system,
                                                         const HostsSpec& spec) {
  const bool is_first = spec.node_rank == 0U || spec.is_endpoint_host == true;
  const bool is_elsewhere =
      spec.registry || spec.node_rank.value_or(0) != 0 || spec.is_endpoint_host == false;
  if (is_elsewhere) return std::unique_ptr<os::Listener>();
  auto listener = system.listen(spec.endpoint);
  if (listener.ok()) return listener;
  if (is_first) {
    return listener.error().with_context(cadre::format(
        "{} must be at the endpoint of the job, {}",
        spec.node_rank ? "node 0" : "a host with is_host=1", spec.endpoint.host_and_port()));
  }
  return std::unique_ptr<os::Listener>();
}

// Opens the registry, and asks it for the coordinator, which this agent becomes if there is none.
Status ask_registry(os::System& system, const RegistrySpec& spec, HostAgentOptions& options) {
  auto registry = spec.open(system);
  if (!registry.ok()) return registry.error();
  const Host& self = options.agent.self;
  const auto claim = (*registry)->claim({.agent = self.id, .address = self.address},
                                        system.deadline_in(kFirstAnswerTime));
  if (!claim.ok()) return claim.error().with_context(spec.name);
  if (*claim) options.agent.endpoint = (*claim)->address;
  options.registry = *std::move(registry);
  options.registry_name = spec.name;
  return {};
}

}  // namespace

Result<HostAgentOptions> prepare_agent(os::System& system, const HostsSpec& spec,
                                       const HostWorkers& workers) {
  HostAgentOptions options{.token = spec.token};
  AgentOptions& agent = options.agent;
  agent.job = workers.job;
  if (!spec.registry) agent.endpoint = spec.endpoint.host_and_port();
  agent.min_hosts = spec.min_hosts;
  agent.max_hosts = spec.max_hosts;
  agent.max_restarts = workers.max_restarts;
  agent.continues_with_half = spec.continues_with_half;
  agent.beat_interval = spec.keep_alive_interval;
  agent.silence = spec.keep_alive_interval * spec.keep_alive_max_attempt;
  agent.margin = spec.keep_alive_interval;
  agent.last_call_timeout = spec.last_call_timeout;
  agent.join_timeout = spec.join_timeout;
  agent.stop_timeout = workers.stop_grace + kKillTime;
  while (agent.self.id == 0) {
    system.random_bytes(std::as_writable_bytes(std::span(&agent.self.id, 1)));
  }
  agent.self.name = system.host().name;
  agent.self.role = workers.role;
  agent.self.num_slots = workers.num_workers;
  agent.self.wanted_rank = spec.node_rank;

  auto at_endpoint = listen_at_endpoint(system, spec);
  if (!at_endpoint.ok()) return at_endpoint.error();
  if (*at_endpoint != nullptr) {
    agent.self.address = agent.endpoint;
    options.listeners.push_back(*std::move(at_endpoint));
    return options;
  }
  const auto host = find_local_host(spec);
  if (!host.ok()) return host.error();
  auto listener = system.listen({os::Address::Kind::kTcp, *host, 0});
  if (!listener.ok()) {
    return listener.error().with_context(spec.local_host.empty()
                                             ? "the address of this host towards the endpoint"
                                             : "--local-addr must be an address of this host");
  }
  agent.self.address =
      os::Address{os::Address::Kind::kTcp, *host, (*listener)->address().port}.host_and_port();
  options.listeners.push_back(*std::move(listener));
  if (spec.registry) CADRE_RETURN_IF_ERROR(ask_registry(system, *spec.registry, options));
  return options;
}

}  // namespace cadre::launch
