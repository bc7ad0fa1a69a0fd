// Runs the Schedule of one rank over the channels of a Transport.
//
// Threads: one at a time. Blocking: run(), until done, the operation's deadline or the Interrupt.
// Lifetime: borrows the System and the Transport; buffers are borrowed until run() returns.
// Errors: as Backend says. Each step sends and receives at the same time, so buffers that are full
// on both sides never stop it.
#pragma once

#include <memory>
#include <vector>

#include "cadre/core/collective/net/incoming.h"
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

// A run of a Schedule's steps on memory.
struct ScheduleRun {
  const Schedule& schedule;
  size_t begin = 0;  // steps [begin, end)
  size_t end = 0;
  SlotMemory memory;
  ReduceKind kind;              // the dtype also scales the blocks that are only moved
  const char* phase = nullptr;  // null: after the schedule
};

class Executor {
 public:
  Executor(os::System& system, Transport& transport);

  // Before the first run of an operation. An operation may have several runs, one after the other.
  void begin(const OpContext& op, Algorithm algorithm);
  Status run(const OpContext& op, const ScheduleRun& run);

 private:
  Status run_step(const OpContext& op, const ScheduleRun& run, const Step& step);
  Status wait(const OpContext& op, std::span<const ChannelInterest> interests);
  Status wait_watching(const OpContext& op, std::span<const ChannelInterest> interests);
  Status check(const OpContext& op, Rank peer);
  Error fail(const OpContext& op, Rank peer, const Error& error) const;
  void refuse(const OperationHeader& refused);
  Link& link(Rank peer);

  os::System& system_;
  Transport& transport_;
  std::vector<std::unique_ptr<Link>> links_;  // by rank, made when they are needed
  std::vector<Rank> watched_;                 // by a wait that takes long
  CallHistory history_;
  OperationHeader header_;  // header of the current operation
  std::unique_ptr<std::byte[]> staging_;
  std::vector<ChannelInterest> interests_;  // interests of a watching wait, kept for its memory
};

}  // namespace cadre
