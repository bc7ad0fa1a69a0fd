// Starts the ranks of a job from within a program, which then needs no launcher: as processes or as
// threads of this machine.
//
//   void train(const cadre::ProcessGroup& world);  // wraps a model with DistributedDataParallel
//   int main() { cadre::spawn(train, /*num_ranks=*/4); }
//
// A rank that is a process is a copy of the calling process, made by fork(): it has what `function`
// captures, and what it changes is not seen by the caller or by other ranks. A rank that is a
// thread shares all of that, and also libtorch's generator of random numbers, so the numbers that a
// rank draws from it differ from run to run; ranks that are threads use memory of the CPU only.
//
// Threads: spawn() with processes is called while the process has one thread, so before anything is
// computed in parallel; with threads, from any thread. Blocking: until all ranks have ended. SIGINT
// and SIGTERM stop ranks that are processes, and then take effect in the caller. Lifetime: no
// process, thread, file or port of the ranks is left. Errors: if a rank fails, spawn() throws
// kAborted with the rank as ErrorDetails::culprit and what it has thrown, or how its process ended.
// The other ranks are stopped: processes are killed when they have not ended a second later; in
// threads, every later operation of their groups throws, and spawn() waits until they return.
// spawn() throws kInvalidArgument for invalid arguments, in a rank, and in a program that a
// launcher has started. Source: torch.multiprocessing.spawn with join=True and its start method
// "fork".
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cadre/core/base/export.h"
#include "cadre/core/os/defaults.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

enum class SpawnMethod : uint8_t {
  kProcesses,  // PyTorch's form
  kThreads,    // starts in microseconds, and debuggers see one process
};

struct SpawnOptions {
  SpawnMethod method = SpawnMethod::kProcesses;
  // The same as in InitOptions.
  Duration timeout = kDefaultOperationTimeout;
  Duration connect_timeout = kDefaultConnectTimeout;
  // The text before each line that a rank that is a process writes, in which "${rank}" is replaced,
  // as in `cadre run`, whose text is "[${rank}] ".
  std::string prefix = {};
};

// The largest number of ranks.
inline constexpr int kMaxSpawnedRanks = 4096;

// Calls `function` in each of `num_ranks` ranks with the group of all ranks, which is closed when
// the function returns. Each rank computes with its share of the cores, at least one, unless
// OMP_NUM_THREADS is set. A rank that is a process and calls exit(0) counts as successful. Its
// static objects are not destroyed, and functions of atexit() are not called.
CADRE_EXPORT void spawn(const std::function<void(const ProcessGroup& world)>& function,
                        int num_ranks, const SpawnOptions& options = {});

}  // namespace cadre
