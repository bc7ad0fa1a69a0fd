#include "cadre/core/collective/host/host_engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/copy.h"
#include "cadre/core/collective/host/staged.h"

namespace cadre {

using host::Buffers;

namespace {

// A rank that leaves with an error waits this long for peers that still access its memory. A peer
// takes longer only if it is stopped or not scheduled.
constexpr Duration kPartingTime = std::chrono::milliseconds(20);

// Returns the largest payload for which one synchronization, after which every rank reads all
// inputs, is cheaper than two synchronizations, with which each rank reduces only a part.
size_t flat_limit(int world_size) {
  return std::min(host::kFlatBytes, 2 * host::kFlatBytes / static_cast<size_t>(world_size));
}

// Returns the ranges of contiguous parts with these sizes.
std::vector<host::Range> ranges_of(std::span<const uint64_t> sizes) {
  std::vector<host::Range> ranges;
  size_t begin = 0;
  for (const uint64_t size : sizes) {
    ranges.push_back({begin, size});
    begin += size;
  }
  return ranges;
}

host::RankParts parts_of(const Collective& c) {
  switch (c.kind) {
    case OpKind::kAllGatherV:
      return host::RankParts(ranges_of(part_sizes(c).received));
    case OpKind::kReduceScatterV:
      return host::RankParts(ranges_of(part_sizes(c).sent));
    case OpKind::kReduceScatter:
      return host::RankParts(c.out.size());
    default:
      return host::RankParts(c.in.size());
  }
}

ReduceKind kind_of(const Collective& c) {
  return {c.dtype, c.reduction.op()};
}

host::Arena arena_of(const HostEngineSetup& setup) {
  std::vector<std::byte*> blocks;
  for (size_t rank = 0; rank < setup.slots.size(); ++rank) {
    const SlotPlace at{setup.slots[rank], setup.blocks[rank]};
    std::byte* const block = setup.memory->resolve(at, host::Arena::block_bytes());
    if (block == nullptr || at.place.offset % host::kFlagAlignment != 0) {
      throw Error(
          ErrorCode::kCorruption,
          format("host engine: the block of rank {}, at offset {} of memory slot {}, is not in the "
                 "slice of that slot",
                 setup.group_ranks.empty() ? Rank(static_cast<int>(rank)) : setup.group_ranks[rank],
                 at.place.offset, at.slot));
    }
    blocks.push_back(block);
  }
  return host::Arena(std::move(blocks));
}

}  // namespace

Result<Piece> HostEngine::cut_block(HostMemory& memory, std::span<const int> slots) {
  return memory.allocate({.num_bytes = host::Arena::block_bytes(),
                          .committed_bytes = host::Arena::flags_part().size,
                          .holders = slots});
}

HostEngine::HostEngine(os::System& system, const os::Interrupt& interrupt, HostEngineSetup setup)
    : setup_(std::move(setup)),
      peers_(system, interrupt, arena_of(setup_),
             {.rank = setup_.rank,
              .world_size = static_cast<int>(setup_.slots.size()),
              .oversubscribed = setup_.oversubscribed,
              .group_ranks = setup_.group_ranks}),
      inputs_(setup_.slots.size()) {}

HostEngine::~HostEngine() {
  for (size_t rank = 0; rank < setup_.slots.size(); ++rank) {
    if (setup_.rank == static_cast<int>(rank)) continue;
    setup_.memory->release_hold(setup_.slots[rank], setup_.blocks[rank].piece);
  }
}

template <typename Direct, typename Staged>
Status HostEngine::run_large(const host::Wanted& wanted, const Direct& direct,
                             const Staged& staged) {
  const auto shared = host::share_buffers(peers_, *setup_.memory, setup_.slots, wanted);
  if (!shared.ok()) return finish(shared.error());
  if (*shared) return finish(direct(**shared));
  CADRE_RETURN_IF_ERROR(commit_staging());
  return finish(staged());
}

Capabilities HostEngine::capabilities() const {
  Capabilities can = full_capabilities("host");
  can.shares_memory = true;
  can.algorithms = format("inline to {} B, flat to {} B, then staged by {} B or direct",
                          host::kInlineBytes, host::kFlatBytes, host::kChunkBytes);
  return can;
}

Completion HostEngine::submit(const OpContext& op, std::span<const Collective> collectives) try {
  return run_in_order(op, collectives, [this](const OpContext& one, const Collective& collective) {
    return run(one, collective);
  });
} catch (const std::exception& thrown) {
  leave_by_exception(thrown.what());
}

Status HostEngine::run(const OpContext& op, const Collective& c) {
  switch (c.kind) {
    case OpKind::kBroadcast:
      return broadcast(op, c);
    case OpKind::kAllReduce:
      return all_reduce(op, c);
    case OpKind::kAllGather:
    case OpKind::kAllGatherV:
      return all_gather(op, c);
    case OpKind::kReduceScatter:
    case OpKind::kReduceScatterV:
      return reduce_scatter(op, c);
    case OpKind::kBarrier:
      return barrier(op);
    case OpKind::kReduce:
      return reduce(op, c);
    case OpKind::kGather:
      return gather(op, c);
    case OpKind::kScatter:
      return scatter(op, c);
    case OpKind::kAllToAll:
      return all_to_all(op, c);
    case OpKind::kAllToAllV:
      return all_to_all_v(op, c);
    case OpKind::kSend:
    case OpKind::kRecv:
    case OpKind::kAllocate:
    case OpKind::kWaitSignal:
      break;
  }
  return Error(ErrorCode::kInternal, format("host engine: {} is not a collective", c.kind));
}

Status HostEngine::broadcast(const OpContext& op, const Collective& c) {
  const bool is_root = peers_.rank() == c.root;
  const Bytes data = c.out;
  if (data.size() <= host::kFlatBytes) {
    CADRE_RETURN_IF_ERROR(enter_with(op, is_root ? ConstBytes(data) : ConstBytes()));
    if (!is_root && !data.empty()) {
      std::memcpy(data.data(), payload_of(c.root, data.size()), data.size());
    }
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, data, data));
  return run_large(
      {.sharing = host::Sharing::kRootInput, .root = c.root, .in_bytes = {data.size()}},
      [&](const host::SharedBuffers& shared) {
        return host::direct_broadcast(peers_, op, shared, data, c.root);
      },
      [&] { return host::staged_broadcast(peers_, op, data, c.root); });
}

Status HostEngine::all_reduce(const OpContext& op, const Collective& c) {
  const Buffers buffers{c.in, c.out};
  const ReduceKind kind = kind_of(c);
  if (c.in.size() <= flat_limit(peers_.world_size())) {
    CADRE_RETURN_IF_ERROR(enter_with(op, c.in));
    reduce_payloads(buffers, 0, kind);
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, c.in, c.out));
  return run_large(
      {.sharing = host::Sharing::kInputsAndOutputs,
       .in_bytes = {c.in.size()},
       .out_bytes = c.in.size()},
      [&](const host::SharedBuffers& shared) {
        return host::direct_all_reduce(peers_, op, shared, c.in.size(), kind);
      },
      [&] { return host::staged_all_reduce(peers_, op, buffers, kind); });
}

Status HostEngine::all_gather(const OpContext& op, const Collective& c) {
  const host::RankParts parts = parts_of(c);
  if (parts.longest() <= host::kFlatBytes) {
    CADRE_RETURN_IF_ERROR(enter_with(op, c.in));
    for (int rank = 0; rank < peers_.world_size(); ++rank) {
      const host::Range part = parts.of(rank);
      std::byte* out = c.out.data() + part.begin;
      const std::byte* from = rank == peers_.rank() ? c.in.data() : payload_of(rank, part.size);
      if (out != from) copy(out, from, part.size, StorePolicy::kCached);
    }
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, c.in, c.out));
  const Buffers buffers{c.in, c.out};
  std::vector<size_t> in_bytes;
  for (int rank = 0; rank < peers_.world_size(); ++rank) in_bytes.push_back(parts.of(rank).size);
  return run_large(
      {.sharing = host::Sharing::kInputs, .in_bytes = std::move(in_bytes)},
      [&](const host::SharedBuffers& shared) {
        return host::direct_all_gather(peers_, op, shared, buffers, parts);
      },
      [&] { return host::staged_all_gather(peers_, op, buffers, parts); });
}

Status HostEngine::reduce_scatter(const OpContext& op, const Collective& c) {
  const Buffers buffers{c.in, c.out};
  const ReduceKind kind = kind_of(c);
  const host::RankParts parts = parts_of(c);
  const size_t own = parts.of(peers_.rank()).begin;
  if (c.in.size() <= host::kFlatBytes) {
    CADRE_RETURN_IF_ERROR(enter_with(op, c.in));
    reduce_payloads(buffers, own, kind);
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, c.in, c.out));
  return run_large(
      {.sharing = host::Sharing::kInputs, .in_bytes = {c.in.size()}},
      [&](const host::SharedBuffers& shared) {
        return host::direct_reduce_scatter(peers_, op, shared, own, c.out, kind);
      },
      [&] { return host::staged_reduce_scatter(peers_, op, buffers, parts, kind); });
}

Status HostEngine::barrier(const OpContext& op) {
  CADRE_RETURN_IF_ERROR(enter_with(op, {}));
  return finish({});
}

Status HostEngine::reduce(const OpContext& op, const Collective& c) {
  const Buffers buffers{c.in, c.out};
  const ReduceKind kind = kind_of(c);
  const bool is_root = peers_.rank() == c.root;
  if (c.in.size() <= flat_limit(peers_.world_size())) {
    CADRE_RETURN_IF_ERROR(enter_with(op, is_root ? ConstBytes() : c.in));
    if (is_root) reduce_payloads(buffers, 0, kind);
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, c.in, c.out));
  return run_large(
      {.sharing = host::Sharing::kInputsAndRootOutput,
       .root = c.root,
       .in_bytes = {c.in.size()},
       .out_bytes = c.in.size()},
      [&](const host::SharedBuffers& shared) {
        return host::direct_all_reduce(peers_, op, shared, c.in.size(), kind);
      },
      [&] { return host::staged_reduce(peers_, op, buffers, kind, c.root); });
}

Status HostEngine::gather(const OpContext& op, const Collective& c) {
  const Buffers buffers{c.in, c.out};
  const bool is_root = peers_.rank() == c.root;
  if (c.in.size() <= host::kFlatBytes) {
    CADRE_RETURN_IF_ERROR(enter_with(op, is_root ? ConstBytes() : c.in));
    for (int rank = 0; is_root && rank < peers_.world_size(); ++rank) {
      std::byte* share = c.out.data() + static_cast<size_t>(rank) * c.in.size();
      const std::byte* from = rank == c.root ? c.in.data() : payload_of(rank, c.in.size());
      if (share != from) copy(share, from, c.in.size(), StorePolicy::kCached);
    }
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, c.in, {}));
  return run_large(
      {.sharing = host::Sharing::kInputs, .in_bytes = {c.in.size()}},
      [&](const host::SharedBuffers& shared) {
        return host::direct_gather(peers_, op, shared, buffers, parts_of(c), c.root);
      },
      [&] { return host::staged_gather(peers_, op, buffers, c.root); });
}

Status HostEngine::scatter(const OpContext& op, const Collective& c) {
  const bool is_root = peers_.rank() == c.root;
  const size_t total = c.out.size() * static_cast<size_t>(peers_.world_size());
  if (total <= host::kFlatBytes) {
    CADRE_RETURN_IF_ERROR(enter_with(op, c.in));
    const std::byte* share = (is_root ? c.in.data() : payload_of(c.root, total)) +
                             c.out.size() * static_cast<size_t>(peers_.rank().value);
    if (c.out.data() != share) copy(c.out.data(), share, c.out.size(), StorePolicy::kCached);
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, c.in, c.out));
  return run_large(
      {.sharing = host::Sharing::kRootInput, .root = c.root, .in_bytes = {total}},
      [&](const host::SharedBuffers& shared) {
        return host::direct_scatter(peers_, op, shared, c.out, c.root);
      },
      [&] {
        return host::staged_scatter(peers_, op, {c.in, c.out}, c.root);
      });
}

Status HostEngine::all_to_all(const OpContext& op, const Collective& c) {
  const auto num_ranks = static_cast<size_t>(peers_.world_size());
  const size_t part = c.in.size() / num_ranks;
  const size_t mine = part * static_cast<size_t>(peers_.rank().value);
  if (c.in.size() <= host::kFlatBytes) {
    CADRE_RETURN_IF_ERROR(enter_with(op, c.in));
    for (int rank = 0; rank < peers_.world_size(); ++rank) {
      const std::byte* from = rank == peers_.rank() ? c.in.data() : payload_of(rank, c.in.size());
      copy(c.out.data() + part * static_cast<size_t>(rank), from + mine, part,
           StorePolicy::kCached);
    }
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, c.in, c.out));
  const std::vector<host::Range> slices = ranges_of(std::vector<uint64_t>(num_ranks, part));
  return exchange_large(op, {c.in, c.out}, {slices, slices, part},
                        std::vector<size_t>(num_ranks, mine));
}

// Each rank writes the sizes of its parts, one row of the PartTable, into its flat slot, and its
// data behind the row if it fits. From the rows every rank computes whether the data of all ranks
// is in their slots.
Status HostEngine::all_to_all_v(const OpContext& op, const Collective& c) {
  const int world_size = peers_.world_size();
  const auto me = static_cast<size_t>(peers_.rank().value);
  const size_t row = PartTable::row_bytes(world_size);
  if (row > host::kFlatBytes) {
    return Error(ErrorCode::kInvalidArgument,
                 format("host engine: all_to_all_v takes at most {} ranks of one host, not {}",
                        host::kFlatBytes / PartTable::row_bytes(1), world_size));
  }
  const PartSizes sizes = part_sizes(c);
  PartTable table(world_size);
  table.set_row(peers_.rank(), sizes);
  const size_t room = host::kFlatBytes - row;
  CADRE_RETURN_IF_ERROR(commit_flat());
  std::byte* const slot = peers_.arena().flat(peers_.rank(), peers_.next_sequence());
  copy(slot, table.row(peers_.rank()).data(), row, StorePolicy::kCached);
  if (c.in.size() <= room) copy(slot + row, c.in.data(), c.in.size(), StorePolicy::kCached);
  CADRE_RETURN_IF_ERROR(enter_large(op, c.in, c.out));
  const auto slot_of = [&](int rank) { return peers_.arena().flat(rank, peers_.sequence()); };
  for (int rank = 0; rank < world_size; ++rank) {
    copy(table.row(rank).data(), slot_of(rank), row, StorePolicy::kCached);
  }
  const Status fit = table.check(op);
  if (!fit.ok()) {
    // All ranks find the same error and end here, before any of them accesses memory of another
    // rank.
    CADRE_RETURN_IF_ERROR(finish({}));
    return fit;
  }
  std::vector<size_t> offsets;
  for (int rank = 0; rank < world_size; ++rank) {
    offsets.push_back(ranges_of(table.sent(rank))[me].begin);
  }
  const host::ExchangeParts parts{ranges_of(sizes.sent), ranges_of(sizes.received),
                                  table.longest_part()};
  if (table.most_sent() > room) return exchange_large(op, {c.in, c.out}, parts, offsets);
  for (int rank = 0; rank < world_size; ++rank) {
    const auto index = static_cast<size_t>(rank);
    const std::byte* from = index == me ? c.in.data() : slot_of(rank) + row;
    copy(c.out.data() + parts.received[index].begin, from + offsets[index],
         parts.received[index].size, StorePolicy::kCached);
  }
  return finish({});
}

// offsets[r] is the position of this rank's part in rank r's input.
Status HostEngine::exchange_large(const OpContext& op, const Buffers& buffers,
                                  const host::ExchangeParts& parts,
                                  const std::vector<size_t>& offsets) {
  std::vector<size_t> in_bytes;
  for (size_t rank = 0; rank < offsets.size(); ++rank) {
    in_bytes.push_back(offsets[rank] + parts.received[rank].size);
  }
  return run_large(
      {.sharing = host::Sharing::kInputs, .in_bytes = std::move(in_bytes)},
      [&](const host::SharedBuffers& shared) {
        return host::direct_all_to_all(peers_, op, shared, buffers.out, parts, offsets);
      },
      [&] { return host::staged_all_to_all(peers_, op, buffers, parts); });
}

// Announces the operation. The payload is in the announcement itself or, if it is too large, in
// this rank's flat slot.
Status HostEngine::enter_with(const OpContext& op, ConstBytes payload) {
  announced_ = {};
  if (payload.size() > host::kInlineBytes) {
    CADRE_RETURN_IF_ERROR(commit_flat());
    copy(peers_.arena().flat(peers_.rank(), peers_.next_sequence()), payload.data(), payload.size(),
         StorePolicy::kCached);
    payload = {};
  }
  is_inside_ = true;
  const Status entered = peers_.enter(op, payload);
  return entered.ok() ? entered : finish(entered);
}

const std::byte* HostEngine::payload_of(Rank rank, size_t num_bytes) const {
  return num_bytes <= host::kInlineBytes ? peers_.payload_of(rank)
                                         : peers_.arena().flat(rank, peers_.sequence());
}

// Reduces a part of the payloads of all ranks, from `offset` on, into buffers.out.
void HostEngine::reduce_payloads(const Buffers& buffers, size_t offset, ReduceKind kind) {
  for (int rank = 0; rank < peers_.world_size(); ++rank) {
    const std::byte* payload =
        rank == peers_.rank() ? buffers.in.data() : payload_of(rank, buffers.in.size());
    inputs_[static_cast<size_t>(rank)] = payload + offset;
  }
  cadre::reduce(buffers.out.data(), inputs_, buffers.out.size() / size_of(kind.dtype), kind);
}

Status HostEngine::enter_large(const OpContext& op, ConstBytes in, Bytes out) {
  const Result<Place> in_place = setup_.memory->find(in);
  if (!in_place.ok()) return in_place.error();
  const Result<Place> out_place = setup_.memory->find(out);
  if (!out_place.ok()) return out_place.error();
  announced_ = {*in_place, *out_place};
  num_out_bytes_ = out.size();
  is_inside_ = true;
  Status entered = peers_.enter(op, std::as_bytes(std::span(&announced_, 1)));
  if (entered.ok()) {
    // Ranks that entered early and sleep are woken here, so that they work at the same time as this
    // rank. Waking them at the end of the operation would be too late.
    peers_.wake_sleepers();
    entered = peers_.check_left(op);
  }
  return entered.ok() ? entered : finish(entered);
}

// Gets memory for the flat slots, before this rank announces the operation. Otherwise peers would
// wait in the operation for a rank that has no memory.
Status HostEngine::commit_flat() {
  if (has_flat_) return {};
  CADRE_RETURN_IF_ERROR(setup_.block.commit(host::Arena::flat_part()));
  has_flat_ = true;
  return {};
}

// Gets memory for the staging when it is first needed: it is large, and groups whose large buffers
// are symmetric need none.
Status HostEngine::commit_staging() {
  if (has_staging_) return {};
  const Status committed = setup_.block.commit(host::Arena::staging_part());
  if (!committed.ok()) return finish(committed);
  has_staging_ = true;
  return {};
}

// Ends the operation on this rank. Fails also if peers have reported this rank as lost: then they
// may have reused memory from which this rank has read a payload or an announcement.
Status HostEngine::finish(Status status) {
  const Status holds = host::check_holds(peers_, *setup_.memory);
  if (!holds.ok()) status = holds;
  if (status.ok()) {
    peers_.wake_sleepers();
    is_inside_ = false;
    return {};
  }
  const Status withdrawn = withdraw(status.error().message());
  if (withdrawn.ok()) return status;
  return Error(status.error().code(),
               format("{}; {}", status.error().message(), withdrawn.error().message()));
}

// The caller may reuse its buffers as soon as it has the error, while a peer that was stopped in
// the middle of the operation may still access them later. So this rank publishes that it has left
// and waits for its peers. If they are not done in time, it makes the pages of its output private;
// peers that read the memory after that discard the result. Allocates no memory on success, because
// a lack of memory may be the reason why this rank leaves.
Status HostEngine::withdraw(std::string_view reason) {
  peers_.mark_left();
  const bool is_symmetric = announced_.in || announced_.out;
  Status status;
  if (is_symmetric && !peers_.are_done(kPartingTime) && announced_.out) {
    status = setup_.memory->revoke(announced_.out, num_out_bytes_, reason);
  }
  is_inside_ = false;
  if (status.ok()) return {};
  return status.error().with_context("peers may still write into this rank's symmetric memory");
}

// Called by the exception handlers of the operations. Calls withdraw(), so that peers no longer
// access this rank's buffers, and rethrows the exception. If withdraw() fails, throws its error
// instead.
void HostEngine::leave_by_exception(std::string_view what) {
  if (is_inside_) withdraw(what).value_or_throw();
  throw;
}

}  // namespace cadre
