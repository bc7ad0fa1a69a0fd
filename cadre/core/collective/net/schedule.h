// What one rank sends, receives and adds in one collective: a value.
//
// Threads: plain values. Blocking: never. Errors: none; REQUIRES what is said below.
// A Schedule is a pure function of its ScheduleKey: it can be printed, tested without any network,
// and costed. It knows elements, not bytes or dtypes.
// Numerics: the order of additions stands in the Schedule (docs/decisions/0005-net-engine.md), and
// all ranks end with identical bits.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/types.h"

namespace cadre {

// The numbers travel in message headers, so that ranks which chose differently find out.
enum class Algorithm : uint8_t {
  kRing = 1,  // all_reduce, reduce, reduce_scatter, all_gather: each rank talks to its neighbours
  kRecursiveDoubling = 2,  // all_reduce: partners at doubling distance exchange everything
  kBinomialTree = 3,       // broadcast, reduce, gather and scatter of little
  kChain = 4,              // broadcast of much: segment after segment from rank to rank
  kBruck = 5,              // all_gather of little: doubling runs of blocks
  kDissemination = 6,      // barrier
  kLinear = 7,             // gather and scatter of much: the root talks to one after the other
  kPairwise = 8,           // all_to_all: another partner in each step
};

std::string_view to_string(Algorithm algorithm);

// Which memory of a rank: what it brought, what it ends with, and room for partial results.
enum class Slot : uint8_t { kInput, kOutput, kScratch };

// A run of elements.
struct Block {
  Slot slot = Slot::kOutput;
  uint64_t begin = 0;
  uint64_t count = 0;

  friend bool operator==(const Block&, const Block&) = default;
};

// What happens to received elements.
enum class Combine : uint8_t {
  kStore,          // recv = received
  kReceivedFirst,  // recv = received op local
  kLocalFirst,     // recv = local op received
};

inline constexpr int kNobody = -1;

// A send and a receive that go on at the same time; either may be absent. The next step begins when
// both are done. `send` is disjoint from `recv` or identical to it, and then means the old content.
struct Step {
  int send_to = kNobody;
  Block send;
  int recv_from = kNobody;
  Block recv;
  Combine combine = Combine::kStore;
  Block local;             // unless kStore: the operand that is here, with recv's count
  bool completes = false;  // recv then holds all ranks' contributions: AVG divides now

  friend bool operator==(const Step&, const Step&) = default;
};

// Everything a Schedule depends on.
struct ScheduleKey {
  Algorithm algorithm = Algorithm::kRing;
  OpKind kind = OpKind::kBarrier;
  Rank rank = 0;
  int world_size = 1;
  // Elements of the input for all_gather and gather, of the output for reduce_scatter and scatter,
  // of one part for all_to_all; 0 for all_to_all_v.
  uint64_t count = 0;
  Rank root = 0;               // for broadcast, reduce, gather and scatter
  uint64_t segment_count = 0;  // for kChain: elements per segment

  friend auto operator<=>(const ScheduleKey&, const ScheduleKey&) = default;
};

struct Schedule {
  ScheduleKey key;
  uint64_t scratch_count = 0;  // elements of Slot::kScratch
  std::vector<Step> steps;
  // The first so many steps add, the others only move finished results.
  size_t num_reduce_steps = 0;

  // One line for the key and one for each step:
  // "  0: send input[4, +4) to 1; recv from 3, output[0, +4) = received + input[0, +4)"
  std::string to_string() const;
  // What this rank sends in all.
  uint64_t num_sent_elements() const;
};

// Whether the algorithm is one for the operation.
bool implements(Algorithm algorithm, OpKind kind);

// REQUIRES: implements(key.algorithm, key.kind); 0 <= rank, root < world_size; segment_count > 0
// for kChain. A world of one has no steps: the output is the input. What a rank keeps of its own
// input (its part of all_gather, gather, scatter and all_to_all) is not part of the schedule.
Schedule make_schedule(const ScheduleKey& key);

// Elements of each rank's part of this rank's input and output, in rank order.
struct PartCounts {
  std::span<const uint64_t> sent;
  std::span<const uint64_t> received;
};

// Pairwise all_to_all_v. REQUIRES: world_size counts in each span; what this rank expects from a
// peer is what that peer sends.
Schedule make_all_to_all_v_schedule(Rank rank, const PartCounts& counts);

// Pairwise all_gather_v: each rank sends its whole input to every other rank, the same traffic as a
// ring. counts: elements of each rank's input, the same on all ranks.
Schedule make_all_gather_v_schedule(Rank rank, std::span<const uint64_t> counts);

// Ring reduce_scatter_v, with the steps and the order of additions of reduce_scatter. counts:
// elements of each rank's output, the same on all ranks.
Schedule make_reduce_scatter_v_schedule(Rank rank, std::span<const uint64_t> counts);

// The part of `count` elements that belongs to a rank, where they are divided: the first
// count % world_size parts have one element more.
Block part_of(uint64_t count, int world_size, Rank rank);

}  // namespace cadre
