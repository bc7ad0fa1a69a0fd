// The engine for groups with several hosts, of which at least one has several ranks: a composition
// of the host engine inside of the hosts and the net engine between them.
//
// Threads: one operation at a time, from any thread. Blocking: every operation, until it is done,
// its deadline passes or the Interrupt of the Transport is raised. Lifetime: borrows the System and
// the Transport; owns the engine of its host. Errors: those of Backend; every error names ranks of
// the group. Source: docs/decisions/0039-hierarchical-engine.md.
// The first operation begins with an exchange of one byte from each rank, from which all ranks
// learn on which hosts the ranks share memory. Ranks that share none count as hosts with one rank.
//
// Cost for n bytes and H hosts: each host sends and receives 2n(H-1)/H over the network in an
// all_reduce (3n(H-1)/H for sums of float16 and bfloat16), and every byte that it needs crosses
// once in the other operations. Large all_reduces and reductions are divided among the ranks of a
// host, so each of them has a flow of its own. They run in pieces: while one piece crosses the
// network, the ranks of a host work on its neighbours. Numerics: the ranks of a host are added in
// rank order; the sums of the hosts are added in the order in which the net engine adds as many
// ranks, with hosts numbered as in HostMap. float16 and bfloat16 are added in float32, from the
// first rank to the last host, and rounded once. all_reduce and reduce give the same bits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cadre/core/collective/backend.h"
#include "cadre/core/collective/hierarchical/host_map.h"
#include "cadre/core/collective/host/host_engine.h"
#include "cadre/core/collective/net/chooser.h"
#include "cadre/core/collective/net/growing_buffer.h"
#include "cadre/core/collective/net/net_engine.h"
#include "cadre/core/os/system.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

struct HierarchicalEngineSetup {
  // host_of_rank[r] identifies the host of rank r; equal on all ranks of the group.
  std::vector<int> host_of_rank;
  // The engine of this rank's host, in which the ranks have the order of the group; null if this
  // rank is alone on its host, or if the ranks of the host share no memory.
  std::unique_ptr<HostEngine> local;
  CrossoverTable table = {};  // the sizes are those of the operation of the whole group
  // The largest part of a rank's slice that crosses the network in one piece. Equal on all ranks.
  uint64_t piece_bytes = 2 << 20;
};

class HierarchicalEngine final : public Backend {
 public:
  HierarchicalEngine(os::System& system, Transport& transport, HierarchicalEngineSetup setup);

  Capabilities capabilities() const override;
  Completion submit(const OpContext& op, std::span<const Collective> collectives) override;

 private:
  // The arithmetic of one reduction.
  struct Arithmetic {
    ReduceKind given;   // what the caller asks for
    ReduceKind summed;  // how partial results are combined; the dtype is that of partial results
    int divisor = 1;    // the divisor of complete results

    bool is_wide() const { return given.dtype != summed.dtype; }
    size_t size() const { return size_of(summed.dtype); }
  };
  // The parts of a piece on which the ranks of a host work. Counts elements.
  struct Slices {
    std::vector<uint64_t> counts;  // counts[i] belongs to the rank with index i
    uint64_t begin = 0;            // the first element of this rank's slice
    uint64_t count = 0;            // the number of its elements
    int num_columns = 1;           // the ranks with lower indices have a slice
  };

  // A part of a vector that crosses the network before the next one. Counts elements.
  struct Piece {
    uint64_t begin = 0;
    uint64_t count = 0;
    Slices slices;  // their `begin` counts from that of the piece

    uint64_t own_begin() const { return begin + slices.begin; }
    bool is_crossed_by(int index) const { return index < slices.num_columns; }
  };

  Status agree(const OpContext& op);
  Status run(const OpContext& op, const Collective& c);
  Status run_flat(const OpContext& op, const Collective& c);
  Status all_reduce(const OpContext& op, const Collective& c);
  Status reduce(const OpContext& op, const Collective& c);
  Status broadcast(const OpContext& op, const Collective& c);
  Status all_gather(const OpContext& op, const Collective& c);
  Status reduce_scatter(const OpContext& op, const Collective& c);
  Status barrier(const OpContext& op);

  Arithmetic arithmetic_of(const Collective& c) const;
  Slices slices_of(std::vector<uint64_t> counts) const;
  Slices even_slices(uint64_t count, Algorithm algorithm) const;
  std::vector<Piece> pieces_of(uint64_t count, size_t size, Algorithm algorithm) const;
  // Runs the three stages of each piece in the order of the pieces. The host stages of two
  // neighbours run while a piece crosses the network, as its IdleWork.
  static Status in_pieces(std::span<const Piece> pieces,
                          const std::function<Status(const Piece&)>& before,
                          const std::function<Status(const Piece&, IdleWork&)>& cross,
                          const std::function<Status(const Piece&)>& after);
  // Reduces the inputs of this host's ranks, or a piece of them. Afterwards this rank's slice is in
  // `sums`, at the position that it has in the vector.
  Status reduce_inside(const OpContext& op, ConstBytes in, Bytes sums, const Slices& slices,
                       ReduceKind kind);
  Status reduce_piece(const OpContext& op, const Collective& c, Bytes all_sums, const Piece& piece,
                      const Arithmetic& arithmetic);
  ConstBytes widened(ConstBytes in, Bytes wide, const Arithmetic& arithmetic) const;
  void complete(std::byte* out, std::byte* sums, uint64_t count,
                const Arithmetic& arithmetic) const;
  // Runs an operation of the host engine. REQUIRES: local_ != nullptr.
  Status inside(const OpContext& op, const Collective& c);
  // Returns a schedule whose partners are ranks of the group, from one in which they are hosts.
  // `index` is the index of each of these ranks on its host.
  Schedule among_hosts(Schedule schedule, int index) const;
  // Runs all steps of such a schedule, or some of them.
  Status across(const OpContext& op, const Schedule& schedule, SlotMemory memory, ReduceKind kind,
                IdleWork* idle = nullptr);
  Status across(const OpContext& op, ScheduleRun run);
  Status all_reduce_across(const OpContext& op, const Schedule& schedule, std::byte* sums,
                           std::byte* out, const Arithmetic& arithmetic, IdleWork& idle);
  ScheduleKey key_across(OpKind kind, Algorithm algorithm, uint64_t count) const;
  bool is_lead() const { return index_ == 0; }
  int num_local() const { return static_cast<int>(hosts_.ranks_of(host_).size()); }

  const Rank rank_;
  const std::vector<int> host_of_rank_;
  std::unique_ptr<HostEngine> local_;
  const CrossoverTable table_;
  const uint64_t piece_bytes_;
  NetEngine net_;
  bool has_agreed_ = false;
  // The hosts and the place of this rank in them, known when the ranks have agreed.
  HostMap hosts_;
  int host_ = 0;
  int index_ = 0;
  GrowingBuffer work_;
  GrowingBuffer result_;
};

}  // namespace cadre
