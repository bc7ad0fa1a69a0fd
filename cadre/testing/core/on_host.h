// A System that pretends to be on another host, so that ranks on one machine form a job of several
// hosts: they share memory with the ranks of the same pretended host, and reach others over TCP.
//
// Threads, blocking and errors: those of the inner System. Lifetime: the inner System must outlive
// it.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/forwarding_system.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {

class OnHost final : public ForwardingSystem {
 public:
  OnHost(os::System& inner, int host) : ForwardingSystem(inner), host_(host) {}

  os::HostInfo host() override {
    os::HostInfo info = inner_.host();
    info.boot_id += cadre::format(" host {}", host_);
    return info;
  }

 private:
  const int host_;
};

// Calls `body` with a context whose System pretends to be on this host; with `context` itself if
// there is no host. A rank on a pretended host does not watch the processes of other ranks.
inline void run_on_host(RankContext& context, std::optional<int> host,
                        const std::function<void(RankContext&)>& body) {
  if (!host) return body(context);
  OnHost system(context.system, *host);
  RankContext placed{.system = system,
                     .rank = context.rank,
                     .world_size = context.world_size,
                     .rendezvous_address = context.rendezvous_address,
                     .store = context.store};
  body(placed);
  context.output = placed.output;
}

// Returns the host of each rank if the ranks are placed on hosts one after the other, as many as
// `ranks_per_host` says.
inline std::vector<int> hosts_of_ranks(const std::vector<int>& ranks_per_host) {
  std::vector<int> hosts;
  for (size_t host = 0; host < ranks_per_host.size(); ++host) {
    hosts.insert(hosts.end(), static_cast<size_t>(ranks_per_host[host]), static_cast<int>(host));
  }
  return hosts;
}

}  // namespace cadre::testing
