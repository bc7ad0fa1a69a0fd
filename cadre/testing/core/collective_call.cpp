#include "cadre/testing/core/collective_call.h"

#include <numeric>
#include <span>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {
namespace {

uint64_t part(const CollectiveCall& call, int from, int to) {
  const bool is_uneven = call.kind == OpKind::kAllGatherV || call.kind == OpKind::kReduceScatterV ||
                         call.kind == OpKind::kAllToAllV;
  return is_uneven && call.parts ? call.parts(from, to) : call.count;
}

// Returns the number of elements in each rank's part.
std::vector<uint64_t> parts_of_ranks(const CollectiveCall& call) {
  std::vector<uint64_t> parts;
  for (int rank = 0; rank < call.world_size; ++rank) parts.push_back(part(call, rank, 0));
  return parts;
}

// Returns the number of elements that `rank` sends to each rank.
std::vector<uint64_t> sent_by(const CollectiveCall& call, int rank) {
  std::vector<uint64_t> parts;
  for (int to = 0; to < call.world_size; ++to) parts.push_back(part(call, rank, to));
  return parts;
}

std::vector<uint64_t> received_by(const CollectiveCall& call, int rank) {
  std::vector<uint64_t> parts;
  for (int from = 0; from < call.world_size; ++from) parts.push_back(part(call, from, rank));
  return parts;
}

uint64_t sum_of(std::span<const uint64_t> parts) {
  return std::accumulate(parts.begin(), parts.end(), uint64_t{0});
}

// Returns the index of the first element of the rank's part in the concatenation of all parts.
uint64_t begin_of(std::span<const uint64_t> parts, int rank) {
  return sum_of(parts.first(static_cast<size_t>(rank)));
}

[[noreturn]] void refuse(OpKind kind) {
  throw Error(ErrorCode::kInternal, format("{} is not a collective", kind));
}

}  // namespace

uint64_t CollectiveCall::num_input(Rank rank) const {
  switch (kind) {
    case OpKind::kBroadcast:
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      return count;
    case OpKind::kAllGather:
    case OpKind::kAllGatherV:
    case OpKind::kGather:
      return part(*this, rank, 0);
    case OpKind::kScatter:
      if (rank != root) return 0;
      [[fallthrough]];
    case OpKind::kReduceScatter:
    case OpKind::kReduceScatterV:
      return sum_of(parts_of_ranks(*this));
    case OpKind::kAllToAll:
    case OpKind::kAllToAllV:
      return sum_of(sent_by(*this, rank));
    case OpKind::kBarrier:
      return 0;
    default:
      refuse(kind);
  }
}

uint64_t CollectiveCall::num_output(Rank rank) const {
  uint64_t num_elements = 0;
  for (const OutputPiece& piece : output(rank)) num_elements += piece.count;
  return num_elements;
}

Collective CollectiveCall::collective(Rank rank, ConstBytes in, Bytes out) const {
  switch (kind) {
    case OpKind::kBroadcast:
      return Collective::broadcast(out, dtype, root);
    case OpKind::kAllReduce:
      return Collective::all_reduce(in, out, dtype, reduction);
    case OpKind::kReduce:
      return Collective::reduce(in, out, dtype, reduction, root);
    case OpKind::kAllGather:
      return Collective::all_gather(in, out, dtype);
    case OpKind::kAllGatherV:
      return Collective::all_gather_v(in, out, dtype, parts_of_ranks(*this));
    case OpKind::kGather:
      return Collective::gather(in, out, dtype, root);
    case OpKind::kScatter:
      return Collective::scatter(in, out, dtype, root);
    case OpKind::kReduceScatter:
      return Collective::reduce_scatter(in, out, dtype, reduction);
    case OpKind::kReduceScatterV:
      return Collective::reduce_scatter_v(in, out, dtype, reduction, parts_of_ranks(*this));
    case OpKind::kAllToAll:
      return Collective::all_to_all(in, out, dtype);
    case OpKind::kAllToAllV:
      return Collective::all_to_all_v(in, out, dtype,
                                      {sent_by(*this, rank), received_by(*this, rank)});
    case OpKind::kBarrier:
      return Collective::barrier();
    default:
      refuse(kind);
  }
}

std::vector<OutputPiece> CollectiveCall::output(Rank rank) const {
  std::vector<OutputPiece> pieces;
  switch (kind) {
    case OpKind::kBroadcast:
      return {{.from = root, .count = count}};
    case OpKind::kReduce:
      if (rank != root) return {};
      [[fallthrough]];
    case OpKind::kAllReduce:
      return {{.from = std::nullopt, .count = count}};
    case OpKind::kReduceScatter:
    case OpKind::kReduceScatterV:
      return {{.from = std::nullopt,
               .begin = begin_of(parts_of_ranks(*this), rank),
               .count = part(*this, rank, 0)}};
    case OpKind::kScatter:
      return {{.from = root, .begin = begin_of(parts_of_ranks(*this), rank), .count = count}};
    case OpKind::kGather:
      if (rank != root) return {};
      [[fallthrough]];
    case OpKind::kAllGather:
    case OpKind::kAllGatherV:
      for (int from = 0; from < world_size; ++from) {
        pieces.push_back({.from = from, .count = part(*this, from, 0)});
      }
      return pieces;
    case OpKind::kAllToAll:
    case OpKind::kAllToAllV:
      for (int from = 0; from < world_size; ++from) {
        pieces.push_back({.from = from,
                          .begin = begin_of(sent_by(*this, from), rank),
                          .count = part(*this, from, rank)});
      }
      return pieces;
    case OpKind::kBarrier:
      return {};
    default:
      refuse(kind);
  }
}

}  // namespace cadre::testing
