// The registry in etcd: the key of the job has the claim of the coordinator, with a lease that the
// coordinator renews while it lives.
//
// Threads: one owner at a time. Blocking: each call, until its deadline at most. Lifetime: borrows
// the System. Errors: those of EtcdClient and of decode_claim() (launch/hosts/claim.h).
// Two agents cannot both claim the key, because it is changed only if it has not changed since it
// was read.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "cadre/launch/cli/etcd/etcd_client.h"
#include "cadre/launch/hosts/registry.h"

namespace cadre::cli {

class EtcdRegistry final : public launch::CoordinatorRegistry {
 public:
  // The time after which the claim of an agent that has died is removed. It must be longer than a
  // few calls of claim() take. etcd's shortest lease is 2 s.
  static constexpr std::chrono::seconds kLease{6};

  EtcdRegistry(EtcdClient client, std::string job);

  Result<std::optional<launch::Claim>> find(Deadline deadline) override;
  Result<std::optional<launch::Claim>> claim(const launch::Claim& own, Deadline deadline) override;
  Status release(launch::AgentId agent, Deadline deadline) override;
  // One second is for clocks of different speed.
  Duration validity() const override { return kLease - std::chrono::seconds(1); }

 private:
  Result<std::optional<launch::Claim>> decode(const std::optional<EtcdClient::Entry>& entry) const;
  // Renews the lease of this registry, or gets a new one if it has none or the old one has ended.
  Status hold_lease(Deadline deadline);

  EtcdClient client_;
  const std::string job_;
  const std::string key_;
  EtcdClient::LeaseId lease_ = 0;
};

// Returns the key of the job's claim.
std::string claim_key(std::string_view job);

}  // namespace cadre::cli
