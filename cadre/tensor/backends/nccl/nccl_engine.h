// The engine for memory of CUDA devices that runs collectives with NCCL, which is loaded at run
// time.
//
// Threads: those of Backend, and a thread "cadre-nccl" as long as the engine. It completes the
// calls, ends them when NCCL or the device reports an error, and aborts the communicator when the
// group fails, within a second if nothing is enqueued.
// Blocking: the factory, until all ranks are connected; submit(), until NCCL has enqueued the call,
// which may need the other ranks at the first use of a connection, but never until the device has
// run it; the destructor, for the times of nccl_communicator.h. Lifetime: one communicator of NCCL
// for each group. Errors: kUnavailable from the factory, the same on all ranks, if a rank cannot
// use NCCL; otherwise those of Backend. Ranks that call different operations wait for each other,
// or get undefined results; the group compares calls that do not end. Numerics: reduction_table.h,
// but a sum or product of float16 or bfloat16 is rounded at each step, and the order of additions
// is NCCL's: fixed for one communicator, and equal bits on all ranks. Source: c10d's
// ProcessGroupNCCL.
#pragma once

#include <memory>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/comm/backend_factory.h"
#include "cadre/tensor/backends/nccl/nccl_agreement.h"
#include "cadre/tensor/backends/nccl/nccl_options.h"

namespace cadre::nccl {

// What the program demands.
struct Demand {
  std::string choice;        // its name, which the ranks compare
  std::string why_not = {};  // why this rank does not use NCCL; empty if it does
  SharedDevices shared = SharedDevices::kRefused;
};

struct MadeEngine {
  std::unique_ptr<Backend> engine;  // null if the ranks cannot use NCCL
  std::string description;          // of the engine; or why there is none, equal on all ranks
};

Result<MadeEngine> make_engine(const BackendSetup& setup, const NcclOptions& options,
                               const Demand& demand);

}  // namespace cadre::nccl
