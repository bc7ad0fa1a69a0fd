// What may be chosen about DistributedDataParallel.
//
// Threads: plain values. Equal on all ranks.
#pragma once

#include "cadre/reduction/options.h"

namespace cadre {

using DistributedDataParallelOptions = DataParallelOptions;

}  // namespace cadre
