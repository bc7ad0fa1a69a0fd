// The order of an engine's work behind that of the callers of its collectives.
//
// Threads: any; the current streams are those of the calling thread. Blocking: never.
#pragma once

#include <span>

#include "cadre/core/base/error.h"
#include "cadre/core/collective/collective.h"

namespace cadre::device {

// Orders what the current stream of the device gets from now on behind the points at which the
// collectives were called (Collective::after). Returns what the driver reports.
Status order_behind_callers(std::span<const Collective> collectives);

}  // namespace cadre::device
