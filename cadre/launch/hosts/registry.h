// A registry: a service outside of the job that knows which agent coordinates it. It helps agents
// to find each other; which round may run is decided among the agents (launch/agent).
//
// Threads: one owner at a time. Blocking: each call, until its deadline at most, as far as the
// system's calls can be ended. Errors: kUnavailable or kTimeout if the registry does not answer;
// those of decode_claim() (claim.h).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/os/system.h"
#include "cadre/launch/hosts/claim.h"

namespace cadre::launch {

class CoordinatorRegistry {
 public:
  virtual ~CoordinatorRegistry() = default;

  // Returns the claim in force, nullopt if there is none.
  virtual Result<std::optional<Claim>> find(Deadline deadline) = 0;
  // Brings `own` into force, or renews it, if no claim of a living agent is in force or if `own`
  // replaces it (claim.h). Returns the claim in force then; nullopt: another agent is writing its
  // claim.
  virtual Result<std::optional<Claim>> claim(const Claim& own, Deadline deadline) = 0;
  // Removes the claim of this agent if it is in force.
  virtual Status release(AgentId agent, Deadline deadline) = 0;
  // Returns for how long no other agent's first claim can come into force after the call of claim()
  // began that has brought this agent's into force.
  virtual Duration validity() const = 0;
};

// How to open the registry of a job. A plain value, so that the description of a job can be copied.
struct RegistrySpec {
  std::string name;  // "etcd at http://node0:2379 (key /cadre/coordinator/none)"
  std::function<Result<std::unique_ptr<CoordinatorRegistry>>(os::System& system)> open;
};

}  // namespace cadre::launch
