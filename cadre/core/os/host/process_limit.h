// The limits of this process (setrlimit(2)).
//
// Threads: any. Blocking: never. Errors: none; a limit that cannot be read counts as absent.
#pragma once

#include <sys/resource.h>

#include <cstdint>
#include <optional>

namespace cadre::os {

// nullopt means that there is no limit.
struct ProcessLimit {
  std::optional<uint64_t> soft;  // the limit in force
  std::optional<uint64_t> hard;  // the highest value of the soft limit without privileges

  friend bool operator==(const ProcessLimit&, const ProcessLimit&) = default;
};

// `resource` is one of RLIMIT_NOFILE, RLIMIT_MEMLOCK, ...
ProcessLimit process_limit(__rlimit_resource_t resource);

}  // namespace cadre::os
