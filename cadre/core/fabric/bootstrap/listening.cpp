#include "cadre/core/fabric/bootstrap/listening.h"

#include <array>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/process_watcher.h"
#include "cadre/core/rendezvous/exchange_addresses.h"

namespace cadre {
namespace {

Status listen_tcp(os::System& system, const Membership& membership, const ListeningOptions& options,
                  Listening& listening) {
  std::vector<std::string> hosts = membership.listen_hosts;
  if (!options.listen_host.empty()) hosts = {options.listen_host};
  if (hosts.empty()) hosts = {"127.0.0.1"};
  for (const std::string& host : hosts) {
    if (membership.job_token.empty() && !is_loopback_host(host)) {
      return Error(ErrorCode::kInvalidArgument,
                   format("rank {} is to listen on {}, which other hosts reach, and that needs a "
                          "job token; set CADRE_JOB_TOKEN to one secret on all ranks",
                          membership.rank, host));
    }
    auto tcp = system.listen({os::Address::Kind::kTcp, host, 0});
    if (!tcp.ok()) return tcp.error();
    listening.rank_address.tcp_address +=
        format("{}{}", listening.tcp.empty() ? "" : " ", (*tcp)->address().to_string());
    listening.tcp.push_back(std::move(tcp).value());
  }
  return {};
}

Status listen_unix(os::System& system, Listening& listening) {
  std::array<uint64_t, 2> random{};
  system.random_bytes(std::as_writable_bytes(std::span(random)));
  auto listener = system.listen(
      {os::Address::Kind::kUnix, format("cadre-{:016x}{:016x}", random[0], random[1]), 0});
  if (!listener.ok()) return listener.error();
  listening.unix = std::move(listener).value();
  listening.rank_address.unix_address = listening.unix->address().to_string();
  return {};
}

}  // namespace

std::vector<os::Listener*> Listening::all() const {
  std::vector<os::Listener*> listeners = {unix.get()};
  for (const auto& listener : tcp) listeners.push_back(listener.get());
  return listeners;
}

wire::RankAddress address_of_this_process(os::System& system) {
  const os::HostInfo host = system.host();
  wire::RankAddress rank_address;
  rank_address.host = host.name;
  rank_address.boot_id = host.boot_id;
  rank_address.pid = host.pid;
  rank_address.core_mask = host.core_mask;
  auto* const watcher = dynamic_cast<os::ProcessWatcher*>(&system);
  if (watcher != nullptr) rank_address.pid_namespace = watcher->pid_namespace();
  system.random_bytes(std::as_writable_bytes(std::span(&rank_address.probe, 1)));
  rank_address.probe |= 1;
  return rank_address;
}

Result<Listening> start_listening(os::System& system, const Membership& membership,
                                  const ListeningOptions& options) {
  Listening listening{.rank_address = address_of_this_process(system)};
  listening.rank_address.version = options.version;
  listening.rank_address.device = options.device;
  CADRE_RETURN_IF_ERROR(listen_tcp(system, membership, options, listening));
  CADRE_RETURN_IF_ERROR(listen_unix(system, listening));
  return listening;
}

}  // namespace cadre
