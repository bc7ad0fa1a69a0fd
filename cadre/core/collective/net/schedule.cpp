#include "cadre/core/collective/net/schedule.h"

#include <algorithm>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/net/algorithms.h"

namespace cadre {
namespace {

std::string_view name_of(Slot slot) {
  switch (slot) {
    case Slot::kInput:
      return "input";
    case Slot::kOutput:
      return "output";
    case Slot::kScratch:
      return "scratch";
  }
  return "unknown";
}

std::string describe(const Block& block) {
  return cadre::format("{}[{}, +{})", name_of(block.slot), block.begin, block.count);
}

std::string describe_value(const Step& step) {
  switch (step.combine) {
    case Combine::kStore:
      return "received";
    case Combine::kReceivedFirst:
      return "received + " + describe(step.local);
    case Combine::kLocalFirst:
      return describe(step.local) + " + received";
  }
  return "unknown";
}

std::string describe(const Step& step) {
  std::string text;
  if (step.send_to != kNobody) {
    text += cadre::format("send {} to {}", describe(step.send), step.send_to);
  }
  if (step.recv_from != kNobody) {
    text += cadre::format("{}recv from {}, {} = {}{}", text.empty() ? "" : "; ", step.recv_from,
                          describe(step.recv), describe_value(step),
                          step.completes ? ", complete" : "");
  }
  return text;
}

}  // namespace

std::string_view to_string(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kRing:
      return "ring";
    case Algorithm::kRecursiveDoubling:
      return "recursive doubling";
    case Algorithm::kBinomialTree:
      return "binomial tree";
    case Algorithm::kChain:
      return "chain";
    case Algorithm::kBruck:
      return "bruck";
    case Algorithm::kDissemination:
      return "dissemination";
    case Algorithm::kLinear:
      return "linear";
    case Algorithm::kPairwise:
      return "pairwise";
  }
  return "unknown";
}

std::string Schedule::to_string() const {
  std::string text =
      cadre::format("{} {}, rank {} of {}, {} elements\n", cadre::to_string(key.algorithm),
                    key.kind, key.rank, key.world_size, key.count);
  for (size_t i = 0; i < steps.size(); ++i) {
    text += cadre::format("  {}: {}\n", i, describe(steps[i]));
  }
  return text;
}

uint64_t Schedule::num_sent_elements() const {
  uint64_t total = 0;
  for (const Step& step : steps) {
    if (step.send_to != kNobody) total += step.send.count;
  }
  return total;
}

bool implements(Algorithm algorithm, OpKind kind) {
  switch (algorithm) {
    case Algorithm::kRing:
      return kind == OpKind::kAllReduce || kind == OpKind::kReduce ||
             kind == OpKind::kReduceScatter || kind == OpKind::kReduceScatterV ||
             kind == OpKind::kAllGather;
    case Algorithm::kRecursiveDoubling:
      return kind == OpKind::kAllReduce;
    case Algorithm::kBinomialTree:
      return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
             kind == OpKind::kScatter;
    case Algorithm::kChain:
      return kind == OpKind::kBroadcast;
    case Algorithm::kBruck:
      return kind == OpKind::kAllGather;
    case Algorithm::kDissemination:
      return kind == OpKind::kBarrier;
    case Algorithm::kLinear:
      return kind == OpKind::kGather || kind == OpKind::kScatter;
    case Algorithm::kPairwise:
      return kind == OpKind::kAllToAll || kind == OpKind::kAllToAllV || kind == OpKind::kAllGatherV;
  }
  return false;
}

Schedule make_schedule(const ScheduleKey& key) {
  Schedule schedule{.key = key};
  if (key.world_size == 1) return schedule;
  switch (key.algorithm) {
    case Algorithm::kRing:
      if (key.kind == OpKind::kAllReduce) add_ring_all_reduce(schedule);
      if (key.kind == OpKind::kReduce) add_ring_reduce(schedule);
      if (key.kind == OpKind::kReduceScatter) add_ring_reduce_scatter(schedule);
      if (key.kind == OpKind::kAllGather) add_ring_all_gather(schedule);
      break;
    case Algorithm::kRecursiveDoubling:
      add_recursive_doubling(schedule);
      break;
    case Algorithm::kBinomialTree:
      if (key.kind == OpKind::kBroadcast) add_binomial_broadcast(schedule);
      if (key.kind == OpKind::kReduce) add_tree_reduce(schedule);
      if (key.kind == OpKind::kGather) add_binomial_gather(schedule);
      if (key.kind == OpKind::kScatter) add_binomial_scatter(schedule);
      break;
    case Algorithm::kChain:
      add_chain_broadcast(schedule);
      break;
    case Algorithm::kBruck:
      add_bruck_all_gather(schedule);
      break;
    case Algorithm::kDissemination:
      add_dissemination_barrier(schedule);
      break;
    case Algorithm::kLinear:
      if (key.kind == OpKind::kGather) add_linear_gather(schedule);
      if (key.kind == OpKind::kScatter) add_linear_scatter(schedule);
      break;
    case Algorithm::kPairwise:
      add_pairwise_exchange(schedule);
      break;
  }
  return schedule;
}

Schedule make_all_to_all_v_schedule(Rank rank, const PartCounts& counts) {
  Schedule schedule{.key = {.algorithm = Algorithm::kPairwise,
                            .kind = OpKind::kAllToAllV,
                            .rank = rank,
                            .world_size = static_cast<int>(counts.sent.size())}};
  if (schedule.key.world_size > 1) add_pairwise_exchange_of(schedule, counts);
  return schedule;
}

Schedule make_all_gather_v_schedule(Rank rank, std::span<const uint64_t> counts) {
  Schedule schedule{.key = {.algorithm = Algorithm::kPairwise,
                            .kind = OpKind::kAllGatherV,
                            .rank = rank,
                            .world_size = static_cast<int>(counts.size())}};
  add_pairwise_gather_of(schedule, counts);
  return schedule;
}

Schedule make_reduce_scatter_v_schedule(Rank rank, std::span<const uint64_t> counts) {
  Schedule schedule{.key = {.algorithm = Algorithm::kRing,
                            .kind = OpKind::kReduceScatterV,
                            .rank = rank,
                            .world_size = static_cast<int>(counts.size())}};
  add_ring_reduce_scatter_of(schedule, counts);
  return schedule;
}

Block part_of(uint64_t count, int world_size, Rank rank) {
  const auto size = static_cast<uint64_t>(world_size);
  const auto index = static_cast<uint64_t>(rank.value);
  const uint64_t each = count / size;
  const uint64_t longer = count % size;
  return {.begin = index * each + std::min(index, longer),
          .count = each + (index < longer ? 1 : 0)};
}

}  // namespace cadre
