// What a program tells the launcher that has started it.
//
//   int main() {
//     cadre::prepare_restart();  // before the program starts threads
//     return cadre::record([] {
//       const auto system = cadre::os::make_native_system();
//       const auto group = cadre::connect_from_environment(
//           *system, {}, system->deadline_in(cadre::kDefaultConnectTimeout));
//       return 0;
//     });
//   }
//
// Declares:
// - `prepare_restart()`: prepares for fast restarts: the launcher then forks the program.
// - `record()`: leaves the exception or the stack with which the program fails for the launcher.
//
// Guide: docs/guide/running/launching.md#restarts,
// docs/guide/running/errors.md#why-a-worker-failed. PyTorch:
// torch.distributed.elastic.multiprocessing.errors.record.
#pragma once

#include "cadre/core/os/proc/fork/prepare_restart.h"
#include "cadre/core/os/proc/record/record.h"
