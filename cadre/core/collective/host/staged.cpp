#include "cadre/core/collective/host/staged.h"

#include <vector>

#include "cadre/core/collective/copy.h"
#include "cadre/core/collective/host/arena.h"

namespace cadre::host {
namespace {

void copy_range(std::byte* out, const std::byte* in, Range range) {
  copy(out + range.begin, in + range.begin, range.size, StorePolicy::kCached);
}

// Runs a pipeline over the chunks: fill(i) copies chunk i in, and drain(i) copies it out one chunk
// later, so that a rank that is late for a moment does not delay the others. Step i + 1 means that
// chunk i is filled and chunk i - 2 is drained. Chunk i uses the memory of chunk i - kNumChunks.
// All ranks drained chunk i - kNumChunks before they filled chunk i - 2, that is, before step i -
// 1.
template <typename Fill, typename Drain>
Status run_pipeline(Peers& peers, const OpContext& op, uint32_t num_chunks, const Fill& fill,
                    const Drain& drain) {
  static_assert(kNumChunks == 4);
  for (uint32_t i = 0; i <= num_chunks; ++i) {
    if (i < num_chunks) {
      op.progress.set_phase("copy in");
      if (i >= kNumChunks) CADRE_RETURN_IF_ERROR(peers.wait_for_all(i - 1, op));
      fill(i);
      peers.signal_step(i + 1);
    }
    if (i > 0) {
      CADRE_RETURN_IF_ERROR(peers.wait_for_all(i, op));
      op.progress.set_phase("copy out");
      drain(i - 1);
    }
  }
  peers.end_steps(num_chunks);
  return {};
}

uint32_t num_parts(size_t total, size_t part) {
  return static_cast<uint32_t>(divide_rounding_up(total, part));
}

// Returns the number of bytes for each rank in a chunk that has data for every rank, rounded down
// to whole cache lines. With up to 8192 ranks the result is not 0.
size_t chunk_part(size_t num_ranks) {
  return kChunkBytes / num_ranks / 64 * 64;
}

// The work on one chunk of an all_reduce, or of a reduce, in which only the root stores the result.
// A chunk has one part, called a share, for each rank, its owner, which reduces it.
class ReductionChunks {
 public:
  ReductionChunks(const Peers& peers, const Buffers& buffers, ReduceKind kind)
      : peers_(peers), buffers_(buffers), kind_(kind), inputs_(num_ranks()) {}

  uint32_t num_chunks() const { return num_parts(buffers_.in.size(), kChunkBytes); }

  // Copies the shares of the other owners into this rank's staging. The place of this rank's own
  // share stays free for its result.
  void copy_in(uint32_t index) const {
    const Range chunk = part_of(buffers_.in.size(), kChunkBytes, index);
    for (int owner = 0; owner < peers_.world_size(); ++owner) {
      if (owner == peers_.rank()) continue;
      copy_range(staging(peers_.rank(), index), buffers_.in.data() + chunk.begin,
                 share(chunk, owner));
    }
  }

  // Reduces this rank's share of the inputs of all ranks into the staging, for the other ranks, and
  // into this rank's output, if it has one.
  void reduce_own(uint32_t index) {
    const Range chunk = part_of(buffers_.in.size(), kChunkBytes, index);
    const Range own = share(chunk, peers_.rank());
    std::byte* out = takes_result() ? buffers_.out.data() + chunk.begin : nullptr;
    for (size_t done = 0; done < own.size; done += kCachedBytes) {
      const Range block{own.begin + done, std::min(kCachedBytes, own.size - done)};
      for (int rank = 0; rank < peers_.world_size(); ++rank) {
        const std::byte* source =
            rank == peers_.rank() ? buffers_.in.data() + chunk.begin : staging(rank, index);
        inputs_[static_cast<size_t>(rank)] = source + block.begin;
      }
      std::byte* result = staging(peers_.rank(), index);
      reduce(result + block.begin, inputs_, block.size / size_of(kind_.dtype), kind_);
      if (out != nullptr) copy_range(out, result, block);
    }
  }

  void copy_out(uint32_t index) const {
    if (!takes_result()) return;
    const Range chunk = part_of(buffers_.in.size(), kChunkBytes, index);
    for (int owner = 0; owner < peers_.world_size(); ++owner) {
      if (owner == peers_.rank()) continue;
      copy_range(buffers_.out.data() + chunk.begin, staging(owner, index), share(chunk, owner));
    }
  }

 private:
  bool takes_result() const { return !buffers_.out.empty(); }
  size_t num_ranks() const { return static_cast<size_t>(peers_.world_size()); }
  std::byte* staging(Rank rank, uint32_t index) const { return peers_.arena().chunk(rank, index); }

  // Returns the range of the owner's share within the chunk.
  Range share(Range chunk, Rank owner) const {
    return part_of(chunk.size, owned_bytes(chunk.size, peers_.world_size()),
                   static_cast<size_t>(owner.value));
  }

  const Peers& peers_;
  const Buffers& buffers_;
  const ReduceKind kind_;
  std::vector<const std::byte*> inputs_;
};

// Runs three stages, each one chunk behind the previous stage. Step 2i + 1 means that this rank has
// copied chunk i in; step 2i + 2 means that it has reduced chunk i - 1. Chunk i uses the memory of
// chunk i - kNumChunks, which every rank has copied out before its step 2(i - 1) + 1.
Status run_reduction(Peers& peers, const OpContext& op, const Buffers& buffers, ReduceKind kind) {
  static_assert(kNumChunks == 4);
  ReductionChunks chunks(peers, buffers, kind);
  const uint32_t num_chunks = chunks.num_chunks();
  for (uint32_t i = 0; i < num_chunks + 2; ++i) {
    if (i < num_chunks) {
      op.progress.set_phase("copy in");
      if (i >= kNumChunks) CADRE_RETURN_IF_ERROR(peers.wait_for_all(2 * i - 1, op));
      chunks.copy_in(i);
      peers.signal_step(2 * i + 1);
    }
    if (i >= 1 && i <= num_chunks) {
      CADRE_RETURN_IF_ERROR(peers.wait_for_all(2 * i - 1, op));
      op.progress.set_phase("reduce");
      chunks.reduce_own(i - 1);
      peers.signal_step(2 * i + 2);
    }
    if (i >= 2) {
      CADRE_RETURN_IF_ERROR(peers.wait_for_all(2 * i, op));
      op.progress.set_phase("copy out");
      chunks.copy_out(i - 2);
    }
  }
  peers.end_steps(2 * num_chunks + 2);
  return {};
}

}  // namespace

Status staged_all_reduce(Peers& peers, const OpContext& op, const Buffers& buffers,
                         ReduceKind kind) {
  return run_reduction(peers, op, buffers, kind);
}

Status staged_reduce(Peers& peers, const OpContext& op, const Buffers& buffers, ReduceKind kind,
                     Rank root) {
  return run_reduction(peers, op, {buffers.in, peers.rank() == root ? buffers.out : Bytes()}, kind);
}

// Each chunk has the next bytes of the parts of all ranks. A part that has ended has an empty range
// in it.
Status staged_reduce_scatter(Peers& peers, const OpContext& op, const Buffers& buffers,
                             const RankParts& parts, ReduceKind kind) {
  const auto num_ranks = static_cast<size_t>(peers.world_size());
  const auto me = static_cast<size_t>(peers.rank().value);
  const Range own = parts.of(peers.rank());
  const size_t part = chunk_part(num_ranks);
  std::vector<const std::byte*> inputs(num_ranks);
  const auto fill = [&](uint32_t i) {
    for (size_t owner = 0; owner < num_ranks; ++owner) {
      if (owner == me) continue;
      const Range whole = parts.of(static_cast<int>(owner));
      const Range range = part_of(whole.size, part, i);
      copy(peers.arena().chunk(peers.rank(), i) + owner * part,
           buffers.in.data() + whole.begin + range.begin, range.size, StorePolicy::kCached);
    }
  };
  const auto drain = [&](uint32_t i) {
    const Range range = part_of(own.size, part, i);
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      inputs[rank] = rank == me ? buffers.in.data() + own.begin + range.begin
                                : peers.arena().chunk(static_cast<int>(rank), i) + me * part;
    }
    reduce(buffers.out.data() + range.begin, inputs, range.size / size_of(kind.dtype), kind);
  };
  return run_pipeline(peers, op, num_parts(parts.longest(), part), fill, drain);
}

Status staged_all_gather(Peers& peers, const OpContext& op, const Buffers& buffers,
                         const RankParts& parts) {
  const Range own = parts.of(peers.rank());
  const auto fill = [&](uint32_t i) {
    const Range range = part_of(own.size, kChunkBytes, i);
    const std::byte* from = buffers.in.data() + range.begin;
    copy(peers.arena().chunk(peers.rank(), i), from, range.size, StorePolicy::kCached);
    std::byte* own_out = buffers.out.data() + own.begin + range.begin;
    if (own_out != from) copy(own_out, from, range.size, StorePolicy::kCached);
  };
  const auto drain = [&](uint32_t i) {
    for (int rank = 0; rank < peers.world_size(); ++rank) {
      if (rank == peers.rank()) continue;
      const Range part = parts.of(rank);
      const Range range = part_of(part.size, kChunkBytes, i);
      copy(buffers.out.data() + part.begin + range.begin, peers.arena().chunk(rank, i), range.size,
           StorePolicy::kCached);
    }
  };
  return run_pipeline(peers, op, num_parts(parts.longest(), kChunkBytes), fill, drain);
}

Status staged_broadcast(Peers& peers, const OpContext& op, Bytes data, Rank root) {
  const bool is_root = peers.rank() == root;
  const auto fill = [&](uint32_t i) {
    if (!is_root) return;
    const Range range = part_of(data.size(), kChunkBytes, i);
    copy(peers.arena().chunk(root, i), data.data() + range.begin, range.size, StorePolicy::kCached);
  };
  const auto drain = [&](uint32_t i) {
    if (is_root) return;
    const Range range = part_of(data.size(), kChunkBytes, i);
    copy(data.data() + range.begin, peers.arena().chunk(root, i), range.size, StorePolicy::kCached);
  };
  return run_pipeline(peers, op, num_parts(data.size(), kChunkBytes), fill, drain);
}

Status staged_gather(Peers& peers, const OpContext& op, const Buffers& buffers, Rank root) {
  const bool is_root = peers.rank() == root;
  const size_t share = buffers.in.size();
  const auto fill = [&](uint32_t i) {
    const Range range = part_of(share, kChunkBytes, i);
    const std::byte* own = buffers.in.data() + range.begin;
    std::byte* to = peers.arena().chunk(peers.rank(), i);
    if (is_root) to = buffers.out.data() + static_cast<size_t>(root.value) * share + range.begin;
    if (to != own) copy(to, own, range.size, StorePolicy::kCached);
  };
  const auto drain = [&](uint32_t i) {
    if (!is_root) return;
    const Range range = part_of(share, kChunkBytes, i);
    for (int rank = 0; rank < peers.world_size(); ++rank) {
      if (rank == root) continue;
      copy(buffers.out.data() + static_cast<size_t>(rank) * share + range.begin,
           peers.arena().chunk(rank, i), range.size, StorePolicy::kCached);
    }
  };
  return run_pipeline(peers, op, num_parts(share, kChunkBytes), fill, drain);
}

// Each chunk of the root has the next bytes of the parts of all ranks.
Status staged_scatter(Peers& peers, const OpContext& op, const Buffers& buffers, Rank root) {
  const auto num_ranks = static_cast<size_t>(peers.world_size());
  const auto me = static_cast<size_t>(peers.rank().value);
  const bool is_root = peers.rank() == root;
  const size_t share = buffers.out.size();
  const size_t part = chunk_part(num_ranks);
  const auto fill = [&](uint32_t i) {
    if (!is_root) return;
    const Range range = part_of(share, part, i);
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      const std::byte* from = buffers.in.data() + rank * share + range.begin;
      std::byte* to = rank == me ? buffers.out.data() + range.begin
                                 : peers.arena().chunk(root, i) + rank * part;
      if (to != from) copy(to, from, range.size, StorePolicy::kCached);
    }
  };
  const auto drain = [&](uint32_t i) {
    if (is_root) return;
    const Range range = part_of(share, part, i);
    copy(buffers.out.data() + range.begin, peers.arena().chunk(root, i) + me * part, range.size,
         StorePolicy::kCached);
  };
  return run_pipeline(peers, op, num_parts(share, part), fill, drain);
}

// Each chunk has the next bytes of the parts for all ranks. A part that has ended has an empty
// range in it.
Status staged_all_to_all(Peers& peers, const OpContext& op, const Buffers& buffers,
                         const ExchangeParts& parts) {
  const auto num_ranks = static_cast<size_t>(peers.world_size());
  const auto me = static_cast<size_t>(peers.rank().value);
  const size_t part = chunk_part(num_ranks);
  const auto fill = [&](uint32_t i) {
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      const Range range = part_of(parts.sent[rank].size, part, i);
      const std::byte* from = buffers.in.data() + parts.sent[rank].begin + range.begin;
      std::byte* to = rank == me ? buffers.out.data() + parts.received[me].begin + range.begin
                                 : peers.arena().chunk(peers.rank(), i) + rank * part;
      copy(to, from, range.size, StorePolicy::kCached);
    }
  };
  const auto drain = [&](uint32_t i) {
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      if (rank == me) continue;
      const Range range = part_of(parts.received[rank].size, part, i);
      copy(buffers.out.data() + parts.received[rank].begin + range.begin,
           peers.arena().chunk(static_cast<int>(rank), i) + me * part, range.size,
           StorePolicy::kCached);
    }
  };
  return run_pipeline(peers, op, num_parts(parts.longest, part), fill, drain);
}

}  // namespace cadre::host
