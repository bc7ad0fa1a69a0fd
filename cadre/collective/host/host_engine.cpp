#include "cadre/collective/host/host_engine.h"

#include <chrono>
#include <cstring>
#include <exception>

#include "cadre/base/format.h"
#include "cadre/collective/copy.h"
#include "cadre/collective/host/staged.h"
#include "cadre/collective/reduction_table.h"
#include "cadre/os/shared_pages.h"

namespace cadre {

using host::Buffers;
using host::SymmetricPlace;

namespace {

// How long a rank that leaves with an error waits for peers that still touch its memory. Only a
// rank that is stopped, or waits for its turn on a core, takes longer.
constexpr Duration kPartingTime = std::chrono::milliseconds(20);

// Up to here one meeting and a read of everybody's input beat two meetings and a read of shares.
size_t flat_limit(int world_size) {
  return std::min(host::kFlatBytes, 2 * host::kFlatBytes / static_cast<size_t>(world_size));
}

// Parts that lie one behind the other.
std::vector<host::Range> ranges_of(std::span<const uint64_t> sizes) {
  std::vector<host::Range> ranges;
  size_t begin = 0;
  for (const uint64_t size : sizes) {
    ranges.push_back({begin, size});
    begin += size;
  }
  return ranges;
}

Status check_supported(const OpContext& op, DType dtype, ReduceOp reduce_op) {
  const Status status = check_engine_reduction(dtype, reduce_op);
  if (status.ok()) return {};
  return status.error().with_context(
      format("host engine: {} #{}", OpDescriptor::from_fingerprint(op.fingerprint).to_string(),
             op.number));
}

}  // namespace

size_t HostEngine::arena_bytes(int world_size) {
  return host::Arena::bytes(world_size);
}

HostEngine::HostEngine(os::System& system, const os::Interrupt& interrupt,
                       std::shared_ptr<os::SharedMemory> arena, const HostEngineOptions& options)
    : arena_(std::move(arena)),
      peers_(system, interrupt, arena_->bytes(),
             {.rank = options.rank,
              .world_size = options.world_size,
              .oversubscribed = options.oversubscribed}),
      segments_(options.world_size),
      inputs_(static_cast<size_t>(options.world_size)) {
  for (const host::Range part : host::Arena::small_parts(options.rank)) {
    os::reserve_pages(*arena_, part.begin, part.size).value_or_throw();
  }
}

void HostEngine::register_symmetric(SymmetricSegment segment) {
  segments_.add(std::move(segment));
}

void HostEngine::unregister_symmetric(uint32_t id) {
  segments_.remove(id);
}

Capabilities HostEngine::capabilities() const {
  return {.name = "host",
          .shares_memory = true,
          .algorithms = format("inline to {} B, flat to {} B, then staged by {} B or direct",
                               host::kInlineBytes, host::kFlatBytes, host::kChunkBytes)};
}

Status HostEngine::broadcast(const OpContext& op, Bytes data, Rank root) try {
  const bool is_root = peers_.rank() == root;
  if (data.size() <= host::kFlatBytes) {
    CADRE_RETURN_IF_ERROR(enter_with(op, is_root ? ConstBytes(data) : ConstBytes()));
    if (!is_root && !data.empty()) {
      std::memcpy(data.data(), payload_of(root, data.size()), data.size());
    }
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, data, data));
  if (const auto direct = direct_buffers(Sharing::kInputs)) {
    return finish(host::direct_broadcast(peers_, op, direct->buffers, data, root));
  }
  CADRE_RETURN_IF_ERROR(reserve_staging());
  return finish(host::staged_broadcast(peers_, op, data, root));
} catch (const std::exception&) {
  leave_by_exception();
}

Status HostEngine::all_reduce(const OpContext& op, ConstBytes in, Bytes out, DType dtype,
                              ReduceOp reduce_op) try {
  CADRE_RETURN_IF_ERROR(check_supported(op, dtype, reduce_op));
  const Buffers buffers{in, out};
  const ReduceKind kind{dtype, reduce_op};
  if (in.size() <= flat_limit(peers_.world_size())) {
    CADRE_RETURN_IF_ERROR(enter_with(op, in));
    reduce_payloads(buffers, 0, kind);
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, in, out));
  if (const auto direct = direct_buffers(Sharing::kInputsAndOutputs)) {
    return finish(host::direct_all_reduce(peers_, op, direct->buffers, in.size(), kind));
  }
  CADRE_RETURN_IF_ERROR(reserve_staging());
  return finish(host::staged_all_reduce(peers_, op, buffers, kind));
} catch (const std::exception&) {
  leave_by_exception();
}

Status HostEngine::all_gather(const OpContext& op, ConstBytes in, Bytes out) try {
  const Buffers buffers{in, out};
  if (in.size() <= host::kFlatBytes) {
    CADRE_RETURN_IF_ERROR(enter_with(op, in));
    for (int rank = 0; rank < peers_.world_size(); ++rank) {
      std::byte* share = out.data() + static_cast<size_t>(rank) * in.size();
      const std::byte* from = rank == peers_.rank() ? in.data() : payload_of(rank, in.size());
      if (share != from) copy(share, from, in.size(), StorePolicy::kCached);
    }
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, in, out));
  if (const auto direct = direct_buffers(Sharing::kInputs)) {
    return finish(host::direct_all_gather(peers_, op, direct->buffers, buffers));
  }
  CADRE_RETURN_IF_ERROR(reserve_staging());
  return finish(host::staged_all_gather(peers_, op, buffers));
} catch (const std::exception&) {
  leave_by_exception();
}

Status HostEngine::reduce_scatter(const OpContext& op, ConstBytes in, Bytes out, DType dtype,
                                  ReduceOp reduce_op) try {
  CADRE_RETURN_IF_ERROR(check_supported(op, dtype, reduce_op));
  const Buffers buffers{in, out};
  const ReduceKind kind{dtype, reduce_op};
  if (in.size() <= host::kFlatBytes) {
    CADRE_RETURN_IF_ERROR(enter_with(op, in));
    reduce_payloads(buffers, out.size() * static_cast<size_t>(peers_.rank().value), kind);
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, in, out));
  if (const auto direct = direct_buffers(Sharing::kInputs)) {
    return finish(host::direct_reduce_scatter(peers_, op, direct->buffers, out, kind));
  }
  CADRE_RETURN_IF_ERROR(reserve_staging());
  return finish(host::staged_reduce_scatter(peers_, op, buffers, kind));
} catch (const std::exception&) {
  leave_by_exception();
}

Status HostEngine::barrier(const OpContext& op) try {
  CADRE_RETURN_IF_ERROR(enter_with(op, {}));
  return finish({});
} catch (const std::exception&) {
  leave_by_exception();
}

Status HostEngine::reduce(const OpContext& op, ConstBytes in, Bytes out, DType dtype,
                          ReduceOp reduce_op, Rank root) try {
  CADRE_RETURN_IF_ERROR(check_supported(op, dtype, reduce_op));
  const Buffers buffers{in, out};
  const ReduceKind kind{dtype, reduce_op};
  const bool is_root = peers_.rank() == root;
  if (in.size() <= flat_limit(peers_.world_size())) {
    CADRE_RETURN_IF_ERROR(enter_with(op, is_root ? ConstBytes() : in));
    if (is_root) reduce_payloads(buffers, 0, kind);
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, in, is_root ? out : Bytes()));
  if (const auto direct = direct_buffers(Sharing::kInputsAndRootOutput, root)) {
    return finish(host::direct_all_reduce(peers_, op, direct->buffers, in.size(), kind));
  }
  CADRE_RETURN_IF_ERROR(reserve_staging());
  return finish(host::staged_reduce(peers_, op, buffers, kind, root));
} catch (const std::exception&) {
  leave_by_exception();
}

Status HostEngine::gather(const OpContext& op, ConstBytes in, Bytes out, Rank root) try {
  const Buffers buffers{in, out};
  const bool is_root = peers_.rank() == root;
  if (in.size() <= host::kFlatBytes) {
    CADRE_RETURN_IF_ERROR(enter_with(op, is_root ? ConstBytes() : in));
    for (int rank = 0; is_root && rank < peers_.world_size(); ++rank) {
      std::byte* share = out.data() + static_cast<size_t>(rank) * in.size();
      const std::byte* from = rank == root ? in.data() : payload_of(rank, in.size());
      if (share != from) copy(share, from, in.size(), StorePolicy::kCached);
    }
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, in, {}));
  if (const auto direct = direct_buffers(Sharing::kInputs)) {
    return finish(host::direct_gather(peers_, op, direct->buffers, buffers, root));
  }
  CADRE_RETURN_IF_ERROR(reserve_staging());
  return finish(host::staged_gather(peers_, op, buffers, root));
} catch (const std::exception&) {
  leave_by_exception();
}

Status HostEngine::scatter(const OpContext& op, ConstBytes in, Bytes out, Rank root) try {
  const bool is_root = peers_.rank() == root;
  const size_t total = out.size() * static_cast<size_t>(peers_.world_size());
  if (total <= host::kFlatBytes) {
    CADRE_RETURN_IF_ERROR(enter_with(op, is_root ? in : ConstBytes()));
    const std::byte* share = (is_root ? in.data() : payload_of(root, total)) +
                             out.size() * static_cast<size_t>(peers_.rank().value);
    if (out.data() != share) copy(out.data(), share, out.size(), StorePolicy::kCached);
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, is_root ? in : ConstBytes(), out));
  if (const auto direct = direct_buffers(Sharing::kOutputsAndRootInput, root)) {
    return finish(host::direct_scatter(peers_, op, direct->buffers, out, root));
  }
  CADRE_RETURN_IF_ERROR(reserve_staging());
  return finish(host::staged_scatter(peers_, op, {in, out}, root));
} catch (const std::exception&) {
  leave_by_exception();
}

Status HostEngine::all_to_all(const OpContext& op, ConstBytes in, Bytes out) try {
  const auto num_ranks = static_cast<size_t>(peers_.world_size());
  const size_t part = in.size() / num_ranks;
  const size_t mine = part * static_cast<size_t>(peers_.rank().value);
  if (in.size() <= host::kFlatBytes) {
    CADRE_RETURN_IF_ERROR(enter_with(op, in));
    for (int rank = 0; rank < peers_.world_size(); ++rank) {
      const std::byte* from = rank == peers_.rank() ? in.data() : payload_of(rank, in.size());
      copy(out.data() + part * static_cast<size_t>(rank), from + mine, part, StorePolicy::kCached);
    }
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, in, out));
  const std::vector<host::Range> slices = ranges_of(std::vector<uint64_t>(num_ranks, part));
  return exchange_large(op, {in, out}, {slices, slices, part},
                        std::vector<size_t>(num_ranks, mine));
} catch (const std::exception&) {
  leave_by_exception();
}

// Each rank puts its row of the table into its slot and its data behind it, if there is room; what
// all have announced decides whether all have.
Status HostEngine::all_to_all_v(const OpContext& op, ConstBytes in, Bytes out,
                                const PartSizes& sizes) try {
  const int world_size = peers_.world_size();
  const auto me = static_cast<size_t>(peers_.rank().value);
  const size_t row = PartTable::row_bytes(world_size);
  if (row > host::kFlatBytes) {
    return Error(ErrorCode::kInvalidArgument,
                 format("host engine: all_to_all_v takes at most {} ranks of one host, not {}",
                        host::kFlatBytes / PartTable::row_bytes(1), world_size));
  }
  PartTable table(world_size);
  table.set_row(peers_.rank(), sizes);
  const size_t room = host::kFlatBytes - row;
  std::byte* const slot = peers_.arena().flat(peers_.rank(), peers_.next_round());
  copy(slot, table.row(peers_.rank()).data(), row, StorePolicy::kCached);
  if (in.size() <= room) copy(slot + row, in.data(), in.size(), StorePolicy::kCached);
  CADRE_RETURN_IF_ERROR(enter_large(op, in, out));
  const auto slot_of = [&](int rank) { return peers_.arena().flat(rank, peers_.round()); };
  for (int rank = 0; rank < world_size; ++rank) {
    copy(table.row(rank).data(), slot_of(rank), row, StorePolicy::kCached);
  }
  const Status fit = table.check(op);
  if (!fit.ok()) {
    CADRE_RETURN_IF_ERROR(finish({}));  // on all ranks, before any touches memory of another
    return fit;
  }
  std::vector<size_t> offsets;
  for (int rank = 0; rank < world_size; ++rank) {
    offsets.push_back(ranges_of(table.sent(rank))[me].begin);
  }
  const host::ExchangeParts parts{ranges_of(sizes.sent), ranges_of(sizes.received),
                                  table.longest_part()};
  if (table.most_sent() > room) return exchange_large(op, {in, out}, parts, offsets);
  for (int rank = 0; rank < world_size; ++rank) {
    const auto index = static_cast<size_t>(rank);
    const std::byte* from = index == me ? in.data() : slot_of(rank) + row;
    copy(out.data() + parts.received[index].begin, from + offsets[index],
         parts.received[index].size, StorePolicy::kCached);
  }
  return finish({});
} catch (const std::exception&) {
  leave_by_exception();
}

// offsets[r] is the place of this rank's part in rank r's input.
Status HostEngine::exchange_large(const OpContext& op, const Buffers& buffers,
                                  const host::ExchangeParts& parts,
                                  const std::vector<size_t>& offsets) {
  if (const auto direct = direct_buffers(Sharing::kInputs)) {
    return finish(
        host::direct_all_to_all(peers_, op, direct->buffers, buffers.out, parts, offsets));
  }
  CADRE_RETURN_IF_ERROR(reserve_staging());
  return finish(host::staged_all_to_all(peers_, op, buffers, parts));
}

// The payload goes into the announcement itself, or, if it is too large, into this rank's slot.
Status HostEngine::enter_with(const OpContext& op, ConstBytes payload) {
  announced_ = {};
  if (payload.size() > host::kInlineBytes) {
    copy(peers_.arena().flat(peers_.rank(), peers_.next_round()), payload.data(), payload.size(),
         StorePolicy::kCached);
    payload = {};
  }
  is_inside_ = true;
  const Status entered = peers_.enter(op, payload);
  return entered.ok() ? entered : finish(entered);
}

const std::byte* HostEngine::payload_of(Rank rank, size_t num_bytes) const {
  return num_bytes <= host::kInlineBytes ? peers_.payload_of(rank)
                                         : peers_.arena().flat(rank, peers_.round());
}

// Folds what lies `offset` bytes into everybody's payload of buffers.in.size() bytes.
void HostEngine::reduce_payloads(const Buffers& buffers, size_t offset, ReduceKind kind) {
  for (int rank = 0; rank < peers_.world_size(); ++rank) {
    const std::byte* payload =
        rank == peers_.rank() ? buffers.in.data() : payload_of(rank, buffers.in.size());
    inputs_[static_cast<size_t>(rank)] = payload + offset;
  }
  cadre::reduce(buffers.out.data(), inputs_, buffers.out.size() / size_of(kind.dtype), kind);
}

Status HostEngine::enter_large(const OpContext& op, ConstBytes in, Bytes out) {
  static_assert(sizeof(Places) <= host::kInlineBytes);
  announced_ = {segments_.find(in, peers_.rank()), segments_.find(out, peers_.rank())};
  num_out_bytes_ = out.size();
  is_inside_ = true;
  Status entered = peers_.enter(op, std::as_bytes(std::span(&announced_, 1)));
  if (entered.ok()) {
    // Now, not at the end: a rank that came early would sleep through all the work in between.
    peers_.settle();
    entered = peers_.check_left(op);
  }
  return entered.ok() ? entered : finish(entered);
}

HostEngine::Places HostEngine::places_of(Rank rank) const {
  Places places;
  std::memcpy(&places, peers_.payload_of(rank), sizeof(places));
  return places;
}

// The segment in which all ranks have the buffer; 0 for none.
uint32_t HostEngine::common_segment(SymmetricPlace Places::*buffer) const {
  const uint32_t mine = (announced_.*buffer).segment;
  for (int rank = 0; rank < peers_.world_size(); ++rank) {
    if ((places_of(rank).*buffer).segment != mine) return 0;
  }
  return mine;
}

// Decided from what all ranks announced, so all decide alike. A segment that this rank announced it
// has registered.
std::optional<HostEngine::Direct> HostEngine::direct_buffers(Sharing sharing, Rank root) const {
  const uint32_t in_segment = common_segment(&Places::in);
  const uint32_t out_segment = common_segment(&Places::out);
  const Places roots = places_of(root);
  const bool needs_inputs = sharing != Sharing::kOutputsAndRootInput;
  if ((needs_inputs ? in_segment : out_segment) == 0) return std::nullopt;
  if (sharing == Sharing::kInputsAndOutputs && out_segment == 0) return std::nullopt;
  if (sharing == Sharing::kInputsAndRootOutput && roots.out.segment != in_segment) {
    return std::nullopt;
  }
  if (sharing == Sharing::kOutputsAndRootInput && roots.in.segment != out_segment) {
    return std::nullopt;
  }
  Direct direct;
  for (int rank = 0; rank < peers_.world_size(); ++rank) {
    const Places theirs = places_of(rank);
    const bool reads_input = needs_inputs || rank == root;
    direct.buffers.ins.push_back(reads_input ? locate(theirs.in, rank, direct) : nullptr);
    if (sharing == Sharing::kInputsAndOutputs ||
        (sharing == Sharing::kInputsAndRootOutput && rank == root)) {
      direct.buffers.outs.push_back(locate(theirs.out, rank, direct));
    }
  }
  return direct;
}

std::byte* HostEngine::locate(SymmetricPlace place, Rank rank, Direct& direct) const {
  const SymmetricSegment& segment = direct.segments.emplace_back(*segments_.get(place.segment));
  return segment.memory->bytes().data() + segment.bytes_per_rank * static_cast<size_t>(rank.value) +
         place.offset;
}

// The memory of all stagings is large, and groups whose large buffers are symmetric need none of
// it.
Status HostEngine::reserve_staging() {
  if (has_staging_) return {};
  const host::Range part = host::Arena::staging_part(peers_.rank());
  const Status reserved = os::reserve_pages(*arena_, part.begin, part.size);
  if (!reserved.ok()) return finish(reserved);
  has_staging_ = true;
  return {};
}

Status HostEngine::finish(Status status) {
  if (status.ok()) {
    peers_.settle();
    is_inside_ = false;
    return {};
  }
  const Status withdrawn = withdraw();
  if (withdrawn.ok()) return status;
  return Error(status.error().code(),
               format("{}; {}", status.error().message(), withdrawn.error().message()));
}

// The caller may use its buffers again as soon as it has the error, while a peer that was stopped
// in the middle of the operation goes on with them. So the peers are told, and those that do not
// stop in time are left with the old pages of what they write; what they read too late they do not
// return. Allocates nothing while all goes well: it may be for want of memory that this rank
// leaves.
Status HostEngine::withdraw() {
  peers_.mark_left();
  const bool is_symmetric = announced_.in.segment != 0 || announced_.out.segment != 0;
  Status status;
  if (is_symmetric && !peers_.are_done(kPartingTime)) {
    if (const auto segment = segments_.get(announced_.out.segment)) {
      const size_t slice = segment->bytes_per_rank * static_cast<size_t>(peers_.rank().value);
      status =
          os::make_pages_private(*segment->memory, slice + announced_.out.offset, num_out_bytes_);
    }
  }
  is_inside_ = false;
  if (status.ok()) return {};
  return status.error().with_context("peers may still write into this rank's symmetric memory");
}

// For the handlers of the operations: the exception goes on to the caller, unless the peers keep
// the memory.
void HostEngine::leave_by_exception() {
  if (is_inside_) withdraw().value_or_throw();
  throw;
}

}  // namespace cadre
