// The registry in a file of a folder that all hosts share: PATH has the claim, and the agent that
// has made it holds a lock on PATH.lock while it lives.
//
// Threads: one owner at a time. Blocking: for the time of the file system, which no deadline can
// end. Lifetime: the kernel drops the lock of a process that dies. Errors: kUnavailable with the
// path and the system's reason; those of decode_claim() (claim.h). Assumes that locks of fcntl()
// exclude each other on all hosts, that rename() is atomic, and that a file is seen under its name
// soon after it was renamed: true for local file systems, NFS 4, Lustre (mounted with flock) and
// CephFS.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "cadre/core/os/files/locked_file.h"
#include "cadre/launch/hosts/registry.h"

namespace cadre::launch {

class FileRegistry final : public CoordinatorRegistry {
 public:
  struct Options {
    std::string job;
    std::string path;
    // The lock of a frozen agent stays, but its claim can be replaced; see validity().
    Duration validity = std::chrono::seconds(5);
  };
  explicit FileRegistry(Options options);

  Result<std::optional<Claim>> find(Deadline deadline) override;
  Result<std::optional<Claim>> claim(const Claim& own, Deadline deadline) override;
  Status release(AgentId agent, Deadline deadline) override;
  Duration validity() const override { return options_.validity; }

 private:
  // Returns whether this registry has the lock, after an attempt to take it.
  Result<bool> take_lock();

  const Options options_;
  const std::string place_;
  std::optional<os::LockedFile> lock_;  // has the lock
  bool is_fresh_ = false;               // no claim was written or seen since the lock was taken
};

// Returns the path of the job's claim for the value of --rdzv-endpoint, a file or a folder.
std::string claim_path(const std::string& endpoint, std::string_view job);

}  // namespace cadre::launch
