// What a program tells the launcher that has started it, and what it learns from a scheduler.
//
//   int main() {
//     cadre::prepare_restart();  // before the program starts threads
//     return cadre::record([] {
//       cadre::Preemption preemption;
//       const auto system = cadre::os::make_native_system();
//       const auto group = cadre::connect_from_environment(
//           *system, {}, system->deadline_in(cadre::kDefaultConnectTimeout));
//       for (int64_t step = 1; step <= 1000; ++step) {
//         group->barrier();                                                 // the step
//         if (preemption.must_leave(*group)) return preemption.leave(step); // the step is saved
//       }
//       group->close(system->deadline_in(cadre::kDefaultCloseTimeout));
//       return 0;
//     });
//   }
//
// Declares:
// - `prepare_restart()`: prepares for fast restarts: the launcher then forks the program.
// - `record()`: leaves the exception or the stack with which the program fails for the launcher.
// - `Preemption`: says on all ranks after the same step that a scheduler ends the job.
// - `PreemptionOptions`, `kRequeueExitCode`: the signals, and the exit code that asks for another
//   run.
// - `Recovery`, `RecoveryOptions`, `JobPosition`: keep the process of this rank when another fails.
// - `find_newest_state()`, `broadcast_newest_state()`, `NewestState`: then give new ranks the
//   state.
//
// Guide: docs/guide/running/launching.md#restarts,
// docs/guide/running/errors.md#why-a-worker-failed, docs/guide/running/preemption.md,
// docs/guide/running/recovery.md. PyTorch: torch.distributed.elastic.multiprocessing.errors.record.
#pragma once

#include "cadre/core/comm/preemption/preemption.h"
#include "cadre/core/comm/recovery/recovery.h"
#include "cadre/core/os/proc/fork/prepare_restart.h"
#include "cadre/core/os/proc/record/record.h"
