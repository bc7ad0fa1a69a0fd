#include "cadre/core/collective/net/chooser.h"

#include <algorithm>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

uint64_t ring_bytes(uint64_t line, int world_size) {
  return line * ring_factor(world_size);
}

}  // namespace

uint64_t ring_factor(int world_size) {
  constexpr int kRanksOfTheTable = 8;
  return static_cast<uint64_t>(std::max(1, world_size / kRanksOfTheTable));
}

std::string to_string(const CrossoverTable& table) {
  return format(
      "all_reduce recursive doubling, ring from {} B; broadcast tree, chain from {} B; all_gather "
      "Bruck, ring from {} B; gather tree, linear from {} B; segments of {} B",
      table.all_reduce_ring_bytes, table.broadcast_chain_bytes, table.all_gather_ring_bytes,
      table.gather_linear_bytes, table.chain_segment_bytes);
}

Algorithm choose(const Choice& choice, const CrossoverTable& table) {
  // Sums of float16 and bfloat16 are sent as float32.
  const bool is_half = choice.dtype == DType::kBfloat16 || choice.dtype == DType::kFloat16;
  const uint64_t widening = is_half ? 2 : 1;
  switch (choice.kind) {
    case OpKind::kAllReduce:
      return choice.num_bytes * widening <
                     ring_bytes(table.all_reduce_ring_bytes, choice.world_size)
                 ? Algorithm::kRecursiveDoubling
                 : Algorithm::kRing;
    case OpKind::kBroadcast:
      // Both algorithms send one message if there are two ranks, and the tree is the simpler one.
      return choice.num_bytes < table.broadcast_chain_bytes || choice.world_size == 2
                 ? Algorithm::kBinomialTree
                 : Algorithm::kChain;
    case OpKind::kAllGather:
      return choice.num_bytes < ring_bytes(table.all_gather_ring_bytes, choice.world_size)
                 ? Algorithm::kBruck
                 : Algorithm::kRing;
    case OpKind::kReduce:
      return choice.num_bytes * widening <
                     ring_bytes(table.all_reduce_ring_bytes, choice.world_size)
                 ? Algorithm::kBinomialTree
                 : Algorithm::kRing;
    case OpKind::kGather:
    case OpKind::kScatter:
      return choice.num_bytes < table.gather_linear_bytes ? Algorithm::kBinomialTree
                                                          : Algorithm::kLinear;
    case OpKind::kAllToAll:
    case OpKind::kAllToAllV:
    case OpKind::kAllGatherV:
      return Algorithm::kPairwise;
    case OpKind::kReduceScatter:
    case OpKind::kReduceScatterV:
      return Algorithm::kRing;
    case OpKind::kBarrier:
    case OpKind::kSend:
    case OpKind::kRecv:
    case OpKind::kAllocate:
    case OpKind::kWaitSignal:
      break;
  }
  return Algorithm::kDissemination;
}

}  // namespace cadre
