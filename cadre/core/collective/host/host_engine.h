// The engine for ranks that share memory. Flags and payload are in a block of each rank, which all
// ranks map.
//
// Threads: one operation at a time, from any thread. Engines over one HostMemory are independent.
// Blocking: every operation, until all ranks have entered it and this rank has its result.
// Lifetime: shares the memory; borrows the System and the Interrupt. The destructor releases the
// blocks of other ranks, so that their owners can reuse them.
// Errors: those of Backend. kUnavailable when there is no memory for a part of this rank's block.
// kAborted for a large operand in memory that this rank has revoked because another group failed;
// then it does not announce the operation. The constructor throws kCorruption for a block outside
// of its rank's slice of the memory. An exception inside an operation ends it for this rank like an
// error. Numerics: every reduction adds in rank order, so the bits depend neither on which of the
// four ways below is used, nor on whether memory is symmetric; see collective/reduce.h. Source:
// docs/decisions/0006-host-engine.md
//
// There are four ways to move data. The size selects one, and for large data also the announcements
// of all ranks:
//   inline  the payload travels in the cache lines of the announcement    one synchronization
//   flat    each rank puts its input into its slot and reads all slots    one synchronization
//   staged  chunks through staging memory, pipelined                      private memory
//   direct  peers' buffers are read and written in place                  symmetric memory
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/collective/backend.h"
#include "cadre/core/collective/host/buffers.h"
#include "cadre/core/collective/host/direct.h"
#include "cadre/core/collective/host/peers.h"
#include "cadre/core/collective/host/shared_buffers.h"
#include "cadre/core/collective/part_table.h"
#include "cadre/core/memory/host_memory.h"
#include "cadre/core/os/interrupt.h"
#include "cadre/core/os/system.h"

namespace cadre {

struct HostEngineSetup {
  std::shared_ptr<HostMemory> memory;  // shared by the engines and buffers of this rank
  Rank rank = 0;
  // There are more ranks than cores on this host, so a wait yields the core instead of spinning.
  bool oversubscribed = false;
  std::vector<int> slots;     // slots[r] is the slot of rank r in the memory
  std::vector<Place> blocks;  // blocks[r] is the place of the block of rank r
  Piece block;                // this rank's block, made by cut_block()
  // group_ranks[r] is the number by which errors name rank r, if the engine serves the ranks that a
  // larger group has on this host. Empty: its own number.
  std::vector<Rank> group_ranks = {};
};

class HostEngine final : public Backend {
 public:
  // Makes this rank's block. Called before the ranks exchange the places of their blocks.
  static Result<Piece> cut_block(HostMemory& memory, std::span<const int> slots);

  HostEngine(os::System& system, const os::Interrupt& interrupt, HostEngineSetup setup);
  ~HostEngine() override;
  HostEngine(const HostEngine&) = delete;
  HostEngine& operator=(const HostEngine&) = delete;

  Capabilities capabilities() const override;
  Completion submit(const OpContext& op, std::span<const Collective> collectives) override;

 private:
  Status run(const OpContext& op, const Collective& c);
  Status broadcast(const OpContext& op, const Collective& c);
  Status all_reduce(const OpContext& op, const Collective& c);
  Status all_gather(const OpContext& op, const Collective& c);
  Status reduce_scatter(const OpContext& op, const Collective& c);
  Status barrier(const OpContext& op);
  Status reduce(const OpContext& op, const Collective& c);
  Status gather(const OpContext& op, const Collective& c);
  Status scatter(const OpContext& op, const Collective& c);
  Status all_to_all(const OpContext& op, const Collective& c);
  Status all_to_all_v(const OpContext& op, const Collective& c);
  Status enter_with(const OpContext& op, ConstBytes payload);
  const std::byte* payload_of(Rank rank, size_t num_bytes) const;
  void reduce_payloads(const host::Buffers& buffers, size_t offset, ReduceKind kind);
  Status enter_large(const OpContext& op, ConstBytes in, Bytes out);
  // Called after enter_large(). Runs `direct` if all buffers that peers would access are in shared
  // memory, else `staged`.
  template <typename Direct, typename Staged>
  Status run_large(const host::Wanted& wanted, const Direct& direct, const Staged& staged);
  Status exchange_large(const OpContext& op, const host::Buffers& buffers,
                        const host::ExchangeParts& parts, const std::vector<size_t>& offsets);
  Status finish(Status status);
  Status withdraw(std::string_view reason);
  [[noreturn]] void leave_by_exception(std::string_view what);
  Status commit_flat();
  Status commit_staging();

  HostEngineSetup setup_;
  host::Peers peers_;
  std::vector<const std::byte*> inputs_;  // is a member so that reduce_payloads() reuses its memory
  bool has_flat_ = false;                 // the memory of this rank's flat slots is allocated
  bool has_staging_ = false;              // the memory of this rank's staging is allocated
  // The announcement of the last operation; empty if that operation was small.
  host::Announcement announced_;
  size_t num_out_bytes_ = 0;  // the size in bytes of the buffer at announced_.out
  bool is_inside_ = false;    // this rank has announced an operation that has not ended
};

}  // namespace cadre
