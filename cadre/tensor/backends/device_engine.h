// The choice of the engine for memory of a device.
//
//   cadre::CommunicatorOptions options;
//   options.device_backend = {.device = {cadre::DeviceType::kCuda, 0},
//                             .make = cadre::device_engine()};
//
// Threads, blocking, lifetime: those of a BackendFactory. Errors: those of the chosen engine;
// kUnavailable, the same on all ranks, if NCCL is demanded and a rank cannot use it.
// Design: docs/decisions/0044-nccl.md.
#pragma once

#include "cadre/core/base/export.h"
#include "cadre/core/comm/backend_factory.h"
#include "cadre/tensor/backends/nccl/nccl_options.h"

namespace cadre {

enum class DeviceEngineChoice {
  // NCCL if every rank of the group has it and a CUDA device of its own, else the staged engine.
  // Rank 0 logs which, and why.
  kAuto,
  kNccl,    // NCCL, or an error that says why a rank cannot use it
  kStaged,  // copies to the host and back (staged_engine.h)
};

// Returns a factory for CommunicatorOptions::device_backend. All ranks pass the same choice.
CADRE_EXPORT BackendFactory device_engine(DeviceEngineChoice choice = DeviceEngineChoice::kAuto,
                                          const NcclOptions& options = {});

}  // namespace cadre
