#include "cadre/core/collective/host/shared_buffers.h"

#include <cstring>

#include "cadre/core/base/format.h"

namespace cadre::host {
namespace {

// Returns whether every wanted buffer is in shared memory. The result is computed from the
// announcements of all ranks, so it is equal on all ranks.
bool are_all_announced(const Peers& peers, const Wanted& wanted) {
  const Announcement roots = announcement_of(peers, wanted.root);
  if (wanted.sharing == Sharing::kRootInput) return static_cast<bool>(roots.in);
  if (wanted.sharing == Sharing::kInputsAndRootOutput && !roots.out) return false;
  for (int rank = 0; rank < peers.world_size(); ++rank) {
    const Announcement theirs = announcement_of(peers, rank);
    if (!theirs.in) return false;
    if (wanted.sharing == Sharing::kInputsAndOutputs && !theirs.out) return false;
  }
  return true;
}

// Returns the address of a buffer of `rank` in this process. The place comes from a peer, so
// resolve() checks it.
Result<std::byte*> locate(const Peers& peers, SharedBuffers& shared, Rank rank, const SlotPlace& at,
                          size_t num_bytes) {
  std::byte* const bytes = shared.memory.resolve(at, num_bytes);
  if (bytes == nullptr) {
    return Error(
        ErrorCode::kCorruption,
        format("host engine: rank {} announced a buffer of {} bytes at offset {}, which is not "
               "in its slice of the host's memory",
               peers.group_rank(rank), num_bytes, at.place.offset));
  }
  const auto* const revocation = &shared.memory.revocation_of(at.slot, at.place.piece);
  // The input and the output of a rank are often in one piece, which check() has to test only once.
  const bool is_known = !shared.sources.empty() && shared.sources.back().revocation == revocation;
  if (!is_known) shared.sources.push_back({rank, revocation});
  return bytes;
}

}  // namespace

Announcement announcement_of(const Peers& peers, Rank rank) {
  Announcement announcement;
  std::memcpy(&announcement, peers.payload_of(rank), sizeof(announcement));
  return announcement;
}

Status check_holds(const Peers& peers, const HostMemory& memory) {
  if (!memory.has_lost_holds()) return {};
  return Error(ErrorCode::kAborted,
               format("host engine: peers have reported rank {} as lost and may have reused the "
                      "memory that it accesses; look at the first failure",
                      peers.group_rank(peers.rank())));
}

Status SharedBuffers::check(const Peers& peers, const OpContext& op) const {
  CADRE_RETURN_IF_ERROR(peers.check_left(op));
  CADRE_RETURN_IF_ERROR(check_holds(peers, memory));
  for (const Source& source : sources) {
    if (source.revocation->load(std::memory_order_seq_cst) == 0) continue;
    return Error(
        ErrorCode::kAborted,
        format("host engine: rank {} took its memory back after a failure while rank {} "
               "was in \"{}\" of {} #{}; look at the first failure",
               peers.group_rank(source.rank), peers.group_rank(peers.rank()), op.progress.phase(),
               OpDescriptor::from_fingerprint(op.fingerprint()).to_string(), op.number));
  }
  return {};
}

Result<std::optional<SharedBuffers>> share_buffers(const Peers& peers, const HostMemory& memory,
                                                   std::span<const int> slots,
                                                   const Wanted& wanted) {
  if (!are_all_announced(peers, wanted)) return std::optional<SharedBuffers>();
  SharedBuffers shared{memory};
  for (int rank = 0; rank < peers.world_size(); ++rank) {
    const Announcement theirs = announcement_of(peers, rank);
    const auto index = static_cast<size_t>(rank);
    const bool is_root = wanted.root == rank;
    std::byte* in = nullptr;
    if (wanted.sharing != Sharing::kRootInput || is_root) {
      const size_t size = wanted.in_bytes[wanted.in_bytes.size() == 1 ? 0 : index];
      const auto located = locate(peers, shared, rank, {slots[index], theirs.in}, size);
      if (!located.ok()) return located.error();
      in = *located;
    }
    shared.ins.push_back(in);
    if (wanted.sharing == Sharing::kInputsAndOutputs ||
        (wanted.sharing == Sharing::kInputsAndRootOutput && is_root)) {
      const auto located =
          locate(peers, shared, rank, {slots[index], theirs.out}, wanted.out_bytes);
      if (!located.ok()) return located.error();
      shared.outs.push_back(*located);
    }
  }
  return std::optional(std::move(shared));
}

}  // namespace cadre::host
