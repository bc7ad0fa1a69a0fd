// The engine for ranks that talk over channels: chooser, schedules and their executor.
//
// Threads: one operation at a time, from any thread. Blocking: every operation, until done, its
// deadline or the Interrupt of its Transport. Lifetime: borrows the System and the Transport.
// Errors: as Backend says. What reduction_table.h refuses and sizes that do not fit are
// kInvalidArgument. Numerics: the order of additions stands in the Schedule; sums, averages and
// products of float16 and bfloat16 travel as float32 until they are complete and are rounded once.
// Both: docs/decisions/0005-net-engine.md.
#pragma once

#include <map>
#include <memory>

#include "cadre/collective/backend.h"
#include "cadre/collective/net/chooser.h"
#include "cadre/collective/net/executor.h"
#include "cadre/collective/part_table.h"
#include "cadre/os/system.h"
#include "cadre/transport/transport.h"

namespace cadre {

class NetEngine final : public Backend {
 public:
  NetEngine(os::System& system, Transport& transport, const CrossoverTable& table = {});

  Capabilities capabilities() const override {
    return {.name = "net", .shares_memory = false, .algorithms = to_string(table_)};
  }
  Status broadcast(const OpContext& op, Bytes data, Rank root) override;
  Status all_reduce(const OpContext& op, ConstBytes in, Bytes out, DType dtype,
                    ReduceOp reduce_op) override;
  Status all_gather(const OpContext& op, ConstBytes in, Bytes out) override;
  Status reduce_scatter(const OpContext& op, ConstBytes in, Bytes out, DType dtype,
                        ReduceOp reduce_op) override;
  Status barrier(const OpContext& op) override;
  Status reduce(const OpContext& op, ConstBytes in, Bytes out, DType dtype, ReduceOp reduce_op,
                Rank root) override;
  Status gather(const OpContext& op, ConstBytes in, Bytes out, Rank root) override;
  Status scatter(const OpContext& op, ConstBytes in, Bytes out, Rank root) override;
  Status all_to_all(const OpContext& op, ConstBytes in, Bytes out) override;
  Status all_to_all_v(const OpContext& op, ConstBytes in, Bytes out,
                      const PartSizes& sizes) override;

 private:
  // Memory that grows to the largest need and is kept, because touching new pages costs more than
  // an operation.
  class Room {
   public:
    std::byte* bytes(size_t num_bytes);

   private:
    std::unique_ptr<std::byte[]> memory_;
    size_t size_ = 0;
  };

  const Schedule& schedule_for(const Choice& choice, uint64_t count, Rank root);
  Status run(const OpContext& op, const Schedule& schedule, SlotMemory memory, ReduceKind kind);
  Status all_reduce_widened(const OpContext& op, const Schedule& schedule, SlotMemory memory,
                            ReduceKind kind);
  Status reduce_scatter_widened(const OpContext& op, const Schedule& schedule, SlotMemory memory,
                                ReduceKind kind);
  Status reduce_widened(const OpContext& op, const Schedule& schedule, SlotMemory memory,
                        ReduceKind kind);
  Status exchange_sizes(const OpContext& op, PartTable& table);

  Transport& transport_;
  CrossoverTable table_;
  Executor executor_;
  std::map<ScheduleKey, Schedule> schedules_;
  Room scratch_;
  Room wide_;
};

}  // namespace cadre
