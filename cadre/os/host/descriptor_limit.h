// The limit of open descriptors of this process.
//
// Threads: any. Blocking: never. Errors: none; a limit that cannot be raised stays.
#pragma once

#include <cstdint>

#include "cadre/base/export.h"

namespace cadre::os {

// Raises the soft limit to the hard one, for this process and those that it starts later, and
// returns what holds then. Shells and service managers set a low soft limit (1024) for the sake of
// select(2), which nothing here uses; a group of many ranks needs several descriptors for each.
CADRE_EXPORT uint64_t raise_descriptor_limit();

}  // namespace cadre::os
