// Runs the Schedule of one rank over the channels of a Transport.
//
// Threads: one at a time. Blocking: run(), until the steps are done, the operation's deadline
// passes or the Interrupt is raised.
// Lifetime: borrows the System and the Transport; buffers are borrowed until run() returns.
// Errors: those of Backend. Each step sends and receives at the same time, so two ranks cannot
// deadlock when the buffers between them are full.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cadre/core/collective/net/link.h"
#include "cadre/core/collective/net/schedule.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/collective/reduce.h"
#include "cadre/core/os/system.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

// The memory behind a Schedule's slots.
struct SlotMemory {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::byte* scratch = nullptr;
};

// Work of this rank that a run does when it first has to wait for the network. The work may block.
// It is empty once it has been done.
using IdleWork = std::function<Status()>;

// Does the work if it is not yet done.
Status run_once(IdleWork& work);

// A range of a Schedule's steps, and the memory on which they run.
struct ScheduleRun {
  const Schedule& schedule;
  size_t begin = 0;  // the range is the steps [begin, end)
  size_t end = 0;
  SlotMemory memory;
  ReduceKind kind;              // the dtype also gives the size of blocks that are only moved
  const char* phase = nullptr;  // if null, the name of the schedule's phase is shown
  // The ranks whose announcements a long wait reads, and that get this rank's; if null, those of
  // the executor.
  const std::vector<Rank>* watched = nullptr;
  IdleWork* idle = nullptr;  // null: none
};

// Returns the ranks at distances 1, 2, 4, ... from ring[index], on both sides.
std::vector<Rank> watched_in(std::span<const Rank> ring, int index);

class Executor {
 public:
  Executor(os::System& system, Transport& transport);

  // Prepares for an operation, which may need several runs, one after the other. Called before the
  // first of them.
  void begin(const OpContext& op, Algorithm algorithm);
  Status run(const OpContext& op, const ScheduleRun& run);
  // Adds ranks to those that every run watches which names none. Such a run also announces its
  // operation to them at once: this rank may complete it without waiting.
  void watch(std::span<const Rank> ranks);

 private:
  Status run_step(const OpContext& op, const ScheduleRun& run, const Step& step);
  // `interests` are those of a step of the run.
  Status wait(const OpContext& op, const ScheduleRun& run,
              std::span<const ChannelInterest> interests);
  Status wait_watching(const OpContext& op, const ScheduleRun& run,
                       std::span<const ChannelInterest> interests);
  Status check(const OpContext& op, Rank peer);
  Error fail(const OpContext& op, Rank peer, const Error& error) const;
  void refuse(const OperationHeader& refused);
  Link& link(Rank peer);

  os::System& system_;
  Transport& transport_;
  // links_[r] is the link to rank r, which is made when it is needed.
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<Rank> watched_;  // see ScheduleRun::watched
  std::vector<Rank> told_;     // those that watch() has added
  CallHistory history_;
  OperationHeader header_;  // the header of the current operation
  std::unique_ptr<std::byte[]> staging_;
  // The interests of a wait in run(), kept only to reuse their memory.
  std::vector<ChannelInterest> interests_;
};

}  // namespace cadre
