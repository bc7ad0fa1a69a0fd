// The engine for ranks that communicate over channels. It chooses an algorithm, makes its schedule
// and executes the schedule.
//
// Threads: one operation at a time, from any thread. Blocking: every operation, until it is done,
// its deadline passes or the Interrupt of its Transport is raised. Lifetime: borrows the System and
// the Transport.
// Errors: those of Backend. Numerics: the Schedule contains the order of additions; sums, averages
// and products of float16 and bfloat16 are sent as float32 until they are complete and are rounded
// once (docs/decisions/0005-net-engine.md).
#pragma once

#include <map>
#include <span>

#include "cadre/core/collective/backend.h"
#include "cadre/core/collective/net/chooser.h"
#include "cadre/core/collective/net/executor.h"
#include "cadre/core/collective/net/growing_buffer.h"
#include "cadre/core/collective/part_table.h"
#include "cadre/core/os/system.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

class NetEngine final : public Backend {
 public:
  NetEngine(os::System& system, Transport& transport, const CrossoverTable& table = {});

  Capabilities capabilities() const override;
  Completion submit(const OpContext& op, std::span<const Collective> collectives) override;

  // The next three are for an engine that runs schedules between some ranks of the transport only.
  // Notes that operation `op` begins. All ranks call it, also those that run no schedule.
  void begin(const OpContext& op, Algorithm algorithm) { executor_.begin(op, algorithm); }
  // Runs steps of a schedule whose partners are ranks of the transport. Provides the scratch
  // memory.
  Status run_among(const OpContext& op, ScheduleRun run);
  // Adds ranks to those that submit() watches.
  void watch(std::span<const Rank> ranks) { executor_.watch(ranks); }

 private:
  Status run(const OpContext& op, const Collective& c);
  // move() runs the collectives without arithmetic, reduce() those with a reduction.
  Status move(const OpContext& op, const Collective& c);
  Status reduce(const OpContext& op, const Collective& c);
  Status all_gather_v(const OpContext& op, const Collective& c);
  Status all_to_all_v(const OpContext& op, const Collective& c);
  // `part` is the number of bytes of one rank's part.
  void copy_own_part(const Collective& c, size_t part) const;

  const Schedule& schedule_for(const Choice& choice, uint64_t count, Rank root);
  Status run_schedule(const OpContext& op, const Schedule& schedule, SlotMemory memory,
                      ReduceKind kind);
  Status all_reduce_widened(const OpContext& op, const Schedule& schedule, SlotMemory memory,
                            ReduceKind kind);
  Status reduce_scatter_v(const OpContext& op, const Collective& c);
  Status reduce_scatter_widened(const OpContext& op, const Schedule& schedule, const Collective& c);
  Status reduce_widened(const OpContext& op, const Schedule& schedule, SlotMemory memory,
                        ReduceKind kind);
  Status exchange_sizes(const OpContext& op, PartTable& table);

  Transport& transport_;
  CrossoverTable table_;
  Executor executor_;
  std::map<ScheduleKey, Schedule> schedules_;
  GrowingBuffer scratch_;
  GrowingBuffer wide_;
};

}  // namespace cadre
