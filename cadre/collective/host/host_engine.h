// The engine for ranks that share memory: flags and payload in an arena that all of them map.
//
// Threads: one operation at a time, from any thread; register and unregister from any thread.
// Blocking: every operation, until all ranks have entered it and this rank has its result.
// Lifetime: shares the arena and the symmetric segments; borrows the System and the Interrupt.
// Errors: as Backend says. What reduction_table.h refuses is kInvalidArgument. kUnavailable when
// there is no memory for this rank's part of the arena; the constructor throws it. An exception out
// of an operation ends it for this rank as an error does. Numerics: every
// way to reduce folds in rank order, so the bits depend neither on the regime nor on whether memory
// is symmetric; see collective/reduce.h. Source: docs/decisions/0006-host-engine.md
//
// Four regimes, chosen by the size and, for large ones, by what all ranks announced:
//   inline  the payload travels in the cache lines of the announcement    one meeting
//   flat    each rank puts its input into its slot and reads all slots    one meeting
//   staged  chunks through staging memory, pipelined                      private memory
//   direct  peers' buffers are read and written in place                  symmetric memory
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cadre/base/export.h"
#include "cadre/collective/backend.h"
#include "cadre/collective/host/buffers.h"
#include "cadre/collective/host/direct.h"
#include "cadre/collective/host/peers.h"
#include "cadre/collective/host/symmetric_segments.h"
#include "cadre/collective/part_table.h"
#include "cadre/os/interrupt.h"
#include "cadre/os/shared_memory.h"
#include "cadre/os/system.h"

namespace cadre {

struct HostEngineOptions {
  Rank rank = 0;
  int world_size = 1;
  // More ranks than cores on this host: waits give the core away instead of spinning.
  bool oversubscribed = false;
};

class HostEngine final : public Backend {
 public:
  // Size of the segment that one rank creates (zeroed) and hands to all others.
  static size_t arena_bytes(int world_size);

  HostEngine(os::System& system, const os::Interrupt& interrupt,
             std::shared_ptr<os::SharedMemory> arena, const HostEngineOptions& options);

  // Operations use a segment once every rank has registered it and their buffers lie in it.
  void register_symmetric(SymmetricSegment segment);
  // Between operations; an unknown id is ignored.
  void unregister_symmetric(uint32_t id);

  Capabilities capabilities() const override;
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
  // Which buffers must be symmetric for the direct regime. What one rank alone announces the others
  // may not have registered, so it must lie in the segment that all have announced.
  enum class Sharing {
    kInputs,
    kInputsAndOutputs,
    kInputsAndRootOutput,
    kOutputsAndRootInput,
  };
  // What a rank announces with a large operation.
  struct Places {
    host::SymmetricPlace in;
    host::SymmetricPlace out;
  };
  // Symmetric buffers of all ranks, with their segments kept mapped.
  struct Direct {
    std::vector<SymmetricSegment> segments;
    host::SharedBuffers buffers;
  };

  Status enter_with(const OpContext& op, ConstBytes payload);
  const std::byte* payload_of(Rank rank, size_t num_bytes) const;
  Places places_of(Rank rank) const;
  uint32_t common_segment(host::SymmetricPlace Places::*buffer) const;
  void reduce_payloads(const host::Buffers& buffers, size_t offset, ReduceKind kind);
  Status enter_large(const OpContext& op, ConstBytes in, Bytes out);
  std::optional<Direct> direct_buffers(Sharing sharing, Rank root = 0) const;
  std::byte* locate(host::SymmetricPlace place, Rank rank, Direct& direct) const;
  Status exchange_large(const OpContext& op, const host::Buffers& buffers,
                        const host::ExchangeParts& parts, const std::vector<size_t>& offsets);
  Status finish(Status status);
  Status withdraw();
  [[noreturn]] void leave_by_exception();
  Status reserve_staging();

  const std::shared_ptr<os::SharedMemory> arena_;
  host::Peers peers_;
  host::SymmetricSegments segments_;
  std::vector<const std::byte*> inputs_;  // scratch of reduce_payloads
  bool has_staging_ = false;              // this rank's staging is allocated
  Places announced_;                      // with the last operation; none with a small one
  size_t num_out_bytes_ = 0;              // of the buffer at announced_.out
  bool is_inside_ = false;                // has announced an operation that has not ended
};

}  // namespace cadre
