// A rendezvous of ranks that know their rank number, through a file that all of them can access and
// that holds the store: "file:///shared/job".
//
// The last rank to leave removes the file. If a killed job left its file behind, the next job
// empties it. Threads, blocking, lifetime and errors: rendezvous.h. A file does not show that a
// process has died: a rank that ends before the group is connected is reported as missing at the
// deadline. Nor does it show how hosts reach each other: ranks on several hosts set `listen_host`.
// Source: torch/distributed/rendezvous.py, "file://".
#pragma once

#include <string>
#include <string_view>

#include "cadre/core/base/log.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/rendezvous/rendezvous.h"

namespace cadre {

struct FileRendezvousOptions {
  std::string path;
  Rank rank = 0;
  int world_size = 1;
  os::Secret job_token;
  // A numeric address, at which the other ranks reach this rank.
  std::string listen_host = "127.0.0.1";
  uint64_t round = 0;
  // The time after which a wait for other ranks is logged, once. If log is null, nothing is logged.
  Duration warn_after = kStoreWarnTime;
  LogSink* log = nullptr;
};

// Returns the path of "file:///path"; it must be absolute.
CADRE_EXPORT Result<std::string> parse_file_url(std::string_view url);

class CADRE_EXPORT FileRendezvous final : public Rendezvous {
 public:
  FileRendezvous(os::System& system, FileRendezvousOptions options)
      : system_(system), options_(std::move(options)) {}

  Result<Membership> join(Deadline deadline) override;

 private:
  os::System& system_;
  FileRendezvousOptions options_;
};

}  // namespace cadre
