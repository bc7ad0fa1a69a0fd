// The limit on the descriptors that this process may have open (RLIMIT_NOFILE).
//
// Threads: any; the limit belongs to the whole process. Blocking: never. Errors: none; a limit that
// the kernel refuses to raise stays as it is.
#pragma once

#include <cstdint>

#include "cadre/core/base/export.h"

namespace cadre::os {

struct DescriptorLimit {
  uint64_t soft = 0;  // what holds
  uint64_t hard = 0;  // what the soft limit may be raised to without privileges
  friend bool operator==(const DescriptorLimit&, const DescriptorLimit&) = default;
};

CADRE_EXPORT DescriptorLimit descriptor_limit();

// Raises the soft limit to the hard one and returns the limits of before. The soft limit is low by
// custom, because select() cannot handle descriptors from 1024 on: a program that is executed by
// this process is to get it back.
CADRE_EXPORT DescriptorLimit raise_descriptor_limit();

}  // namespace cadre::os
