// The limit on the descriptors that this process may have open (RLIMIT_NOFILE).
//
// Threads: any; the limit belongs to the whole process. Blocking: never. Errors: none; a limit that
// the kernel does not raise stays as it is.
#pragma once

#include <cstdint>

#include "cadre/core/base/export.h"

namespace cadre::os {

struct DescriptorLimit {
  uint64_t soft = 0;  // the limit in force
  uint64_t hard = 0;  // the highest value of the soft limit without privileges
  friend bool operator==(const DescriptorLimit&, const DescriptorLimit&) = default;
};

CADRE_EXPORT DescriptorLimit descriptor_limit();

// Raises the soft limit to the hard one and returns the previous limits. The default soft limit is
// low because select() cannot handle descriptors from 1024 on. Therefore a program that this
// process executes must get the previous limit.
CADRE_EXPORT DescriptorLimit raise_descriptor_limit();

}  // namespace cadre::os
