#include "cadre/collective/host/host_engine.h"

#include <array>
#include <cstring>

#include "cadre/base/format.h"
#include "cadre/collective/copy.h"
#include "cadre/collective/host/staged.h"
#include "cadre/collective/reduction_table.h"

namespace cadre {

using host::Buffers;
using host::SymmetricPlace;

namespace {

// What a rank announces with a large operation.
struct Places {
  SymmetricPlace in;
  SymmetricPlace out;
};
static_assert(sizeof(Places) <= host::kInlineBytes);

// Up to here one meeting and a read of everybody's input beat two meetings and a read of shares.
size_t flat_limit(int world_size) {
  return std::min(host::kFlatBytes, 2 * host::kFlatBytes / static_cast<size_t>(world_size));
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
      inputs_(static_cast<size_t>(options.world_size)) {}

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

Status HostEngine::broadcast(const OpContext& op, Bytes data, Rank root) {
  const bool is_root = peers_.rank() == root;
  if (data.size() <= host::kFlatBytes) {
    CADRE_RETURN_IF_ERROR(enter_with(op, is_root ? ConstBytes(data) : ConstBytes()));
    if (!is_root && !data.empty()) {
      std::memcpy(data.data(), payload_of(root, data.size()), data.size());
    }
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, data, data));
  if (const auto direct = direct_buffers(/*with_outs=*/false)) {
    return finish(host::direct_broadcast(peers_, op, direct->buffers, data, root));
  }
  return finish(host::staged_broadcast(peers_, op, data, root));
}

Status HostEngine::all_reduce(const OpContext& op, ConstBytes in, Bytes out, DType dtype,
                              ReduceOp reduce_op) {
  CADRE_RETURN_IF_ERROR(check_supported(op, dtype, reduce_op));
  const Buffers buffers{in, out};
  const ReduceKind kind{dtype, reduce_op};
  if (in.size() <= flat_limit(peers_.world_size())) {
    CADRE_RETURN_IF_ERROR(enter_with(op, in));
    reduce_payloads(buffers, 0, kind);
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, in, out));
  if (const auto direct = direct_buffers(/*with_outs=*/true)) {
    return finish(host::direct_all_reduce(peers_, op, direct->buffers, in.size(), kind));
  }
  return finish(host::staged_all_reduce(peers_, op, buffers, kind));
}

Status HostEngine::all_gather(const OpContext& op, ConstBytes in, Bytes out) {
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
  if (const auto direct = direct_buffers(/*with_outs=*/false)) {
    return finish(host::direct_all_gather(peers_, op, direct->buffers, buffers));
  }
  return finish(host::staged_all_gather(peers_, op, buffers));
}

Status HostEngine::reduce_scatter(const OpContext& op, ConstBytes in, Bytes out, DType dtype,
                                  ReduceOp reduce_op) {
  CADRE_RETURN_IF_ERROR(check_supported(op, dtype, reduce_op));
  const Buffers buffers{in, out};
  const ReduceKind kind{dtype, reduce_op};
  if (in.size() <= host::kFlatBytes) {
    CADRE_RETURN_IF_ERROR(enter_with(op, in));
    reduce_payloads(buffers, out.size() * static_cast<size_t>(peers_.rank().value), kind);
    return finish({});
  }
  CADRE_RETURN_IF_ERROR(enter_large(op, in, out));
  if (const auto direct = direct_buffers(/*with_outs=*/false)) {
    return finish(host::direct_reduce_scatter(peers_, op, direct->buffers, out, kind));
  }
  return finish(host::staged_reduce_scatter(peers_, op, buffers, kind));
}

Status HostEngine::barrier(const OpContext& op) {
  CADRE_RETURN_IF_ERROR(enter_with(op, {}));
  return finish({});
}

// The payload goes into the announcement itself, or, if it is too large, into this rank's slot.
Status HostEngine::enter_with(const OpContext& op, ConstBytes payload) {
  if (payload.size() <= host::kInlineBytes) return peers_.enter(op, payload);
  copy(peers_.arena().flat(peers_.rank(), peers_.next_round()), payload.data(), payload.size(),
       StorePolicy::kCached);
  return peers_.enter(op, {});
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
  reduce(buffers.out.data(), inputs_, buffers.out.size() / size_of(kind.dtype), kind);
}

Status HostEngine::enter_large(const OpContext& op, ConstBytes in, Bytes out) {
  const Places places{segments_.find(in, peers_.rank()), segments_.find(out, peers_.rank())};
  return peers_.enter(op, std::as_bytes(std::span(&places, 1)));
}

// Decided from what all ranks announced, so all decide alike: every input (and output) must lie in
// one and the same segment, which this rank then has registered too.
std::optional<HostEngine::Direct> HostEngine::direct_buffers(bool with_outs) const {
  const auto places_of = [this](Rank rank) {
    Places places;
    std::memcpy(&places, peers_.payload_of(rank), sizeof(places));
    return places;
  };
  const Places mine = places_of(peers_.rank());
  for (int rank = 0; rank < peers_.world_size(); ++rank) {
    const Places theirs = places_of(rank);
    if (theirs.in.segment == 0 || theirs.in.segment != mine.in.segment) return std::nullopt;
    if (!with_outs) continue;
    if (theirs.out.segment == 0 || theirs.out.segment != mine.out.segment) return std::nullopt;
  }
  Direct direct;
  const auto place_in = [this, &direct](SymmetricPlace place, Rank rank) {
    const SymmetricSegment& segment = direct.segments.emplace_back(*segments_.get(place.segment));
    return segment.memory->bytes().data() +
           segment.bytes_per_rank * static_cast<size_t>(rank.value) + place.offset;
  };
  for (int rank = 0; rank < peers_.world_size(); ++rank) {
    const Places theirs = places_of(rank);
    direct.buffers.ins.push_back(place_in(theirs.in, rank));
    if (with_outs) direct.buffers.outs.push_back(place_in(theirs.out, rank));
  }
  return direct;
}

Status HostEngine::finish(Status status) {
  if (status.ok()) peers_.settle();
  return status;
}

}  // namespace cadre
