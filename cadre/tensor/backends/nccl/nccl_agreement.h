// The agreement of the ranks of a group on whether they use NCCL, before any rank calls a function
// of NCCL that involves others.
//
// Each rank says in the group's store what it has; rank 0 decides, and all ranks get its decision.
// Threads: any. Blocking: until setup.deadline or for kAgreeTime at most, or until the group's
// Interrupt is raised. Errors: kInvalidArgument, the same on all ranks, if the ranks have made
// different choices; kTimeout that names a rank which does not take part; those of the store;
// kAborted when the Interrupt is raised.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/comm/backend_factory.h"
#include "cadre/tensor/backends/nccl/nccl_api.h"
#include "cadre/tensor/device/device_identity.h"

namespace cadre::nccl {

// How long the ranks wait for each other. All have connected to the group by then.
inline constexpr Duration kAgreeTime = std::chrono::seconds(120);

// What one rank has.
struct Readiness {
  std::string choice;   // what the program demands; equal on all ranks
  std::string why_not;  // why this rank cannot use NCCL; empty if it can
  std::string version;  // of NCCL; equal on all ranks
  device::DeviceIdentity device;
};

struct Decision {
  std::string why_not;  // why the group does not use NCCL, equal on all ranks; empty if it does
  UniqueId id{};
};

enum class SharedDevices { kRefused, kLeftToNccl };

// Returns which ranks have made different choices; empty if none have.
std::string why_choices_differ(std::span<const Readiness> ranks);

// Returns why ranks that have this cannot use NCCL together; empty if they can. The lowest rank at
// fault is named.
std::string why_not_together(std::span<const Readiness> ranks, SharedDevices shared);

// `make_id` is called on rank 0 if all ranks can use NCCL.
Result<Decision> agree(const BackendSetup& setup, const Readiness& own, SharedDevices shared,
                       const std::function<Result<UniqueId>()>& make_id);

// Tells the other ranks that this rank could not make its communicator. They get the text from
// reported_failure(). Errors are ignored, because this rank reports its own failure anyway.
void report_failure(const BackendSetup& setup, const std::string& text);
std::optional<std::string> reported_failure(const BackendSetup& setup);

}  // namespace cadre::nccl
