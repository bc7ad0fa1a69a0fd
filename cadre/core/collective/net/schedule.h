// The sends, receives and additions of one rank in one collective, as a value.
//
// Threads: plain values. Blocking: never. Errors: none; each function says what it REQUIRES. A
// Schedule is a pure function of its ScheduleKey: it can be printed, tested without any network,
// and its cost can be computed. It counts elements and knows neither bytes nor dtypes. Numerics:
// the Schedule contains the order of additions (docs/decisions/0005-net-engine.md), and all ranks
// end with identical bits.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/types.h"

namespace cadre {

// The numeric values are sent in message headers, so that ranks detect if they have chosen
// different algorithms.
enum class Algorithm : uint8_t {
  kRing = 1,  // all_reduce, reduce, reduce_scatter, all_gather: each rank sends to its neighbour
  kRecursiveDoubling = 2,  // all_reduce: partners at distances 1, 2, 4, ... exchange all data
  kBinomialTree = 3,       // broadcast, reduce, gather and scatter of small data
  kChain = 4,              // broadcast of large data: segments go from rank to rank
  kBruck = 5,              // all_gather of small data: the number of blocks doubles in each step
  kDissemination = 6,      // barrier
  kLinear = 7,    // gather and scatter of large data: the root serves one rank after the other
  kPairwise = 8,  // all_to_all: a different partner in each step
};

std::string_view to_string(Algorithm algorithm);

// The memory of a rank: its input, its output, and room for partial results.
enum class Slot : uint8_t { kInput, kOutput, kScratch };

// A contiguous range of elements.
struct Block {
  Slot slot = Slot::kOutput;
  uint64_t begin = 0;
  uint64_t count = 0;

  friend bool operator==(const Block&, const Block&) = default;
};

// Says what is done with received elements.
enum class Combine : uint8_t {
  kStore,          // recv = received
  kReceivedFirst,  // recv = received op local
  kLocalFirst,     // recv = local op received
};

inline constexpr int kNobody = -1;

// A send and a receive that run at the same time; one of them may be absent. The next step begins
// when both are done. `send` is either disjoint from `recv`, or the same block, whose content
// before the receive is sent.
struct Step {
  int send_to = kNobody;
  Block send;
  int recv_from = kNobody;
  Block recv;
  Combine combine = Combine::kStore;
  Block local;  // the local operand, with recv's count; unused for kStore
  // After this step `recv` has the contributions of all ranks, so for an AVG the executor divides
  // it now.
  bool completes = false;

  friend bool operator==(const Step&, const Step&) = default;
};

// Everything a Schedule depends on.
struct ScheduleKey {
  Algorithm algorithm = Algorithm::kRing;
  OpKind kind = OpKind::kBarrier;
  Rank rank = 0;
  int world_size = 1;
  // The number of elements: of the input for all_gather and gather, of the output for
  // reduce_scatter and scatter, of one part for all_to_all; 0 for all_to_all_v.
  uint64_t count = 0;
  Rank root = 0;               // is used by broadcast, reduce, gather and scatter
  uint64_t segment_count = 0;  // the number of elements of each segment of a kChain

  friend auto operator<=>(const ScheduleKey&, const ScheduleKey&) = default;
};

struct Schedule {
  ScheduleKey key;
  uint64_t scratch_count = 0;  // the number of elements of Slot::kScratch
  std::vector<Step> steps;
  // The first num_reduce_steps steps add; the other steps only move finished results.
  size_t num_reduce_steps = 0;

  // Returns one line for the key and one for each step: "  0: send input[4, +4) to 1; recv from 3,
  // output[0, +4) = received + input[0, +4)".
  std::string to_string() const;
  // Returns the number of elements that this rank sends in all steps.
  uint64_t num_sent_elements() const;
};

// Returns whether the algorithm can run the operation.
bool implements(Algorithm algorithm, OpKind kind);

// Returns the steps of one rank. If the group has one rank, there are none: the output is the
// input. The part of its own input that a rank keeps (in all_gather, gather, scatter and
// all_to_all) is not in the schedule. REQUIRES: implements(key.algorithm, key.kind); 0 <= rank,
// root < world_size; segment_count > 0 for kChain.
Schedule make_schedule(const ScheduleKey& key);

// The sizes of the parts of an all_to_all_v, in elements: this rank sends sent[r] elements to rank
// r and receives received[r] elements from it.
struct PartCounts {
  std::span<const uint64_t> sent;
  std::span<const uint64_t> received;
};

// Makes a pairwise all_to_all_v. REQUIRES: each span has world_size counts; each count in
// `received` is equal to what that peer sends to this rank.
Schedule make_all_to_all_v_schedule(Rank rank, const PartCounts& counts);

// Makes a pairwise all_gather_v: each rank sends its whole input to every other rank, which is the
// same traffic as a ring. counts[r] is the number of elements of rank r's input; all ranks pass the
// same counts.
Schedule make_all_gather_v_schedule(Rank rank, std::span<const uint64_t> counts);

// Makes a ring reduce_scatter_v, with the steps and the order of additions of reduce_scatter.
// counts[r] is the number of elements of rank r's output; all ranks pass the same counts.
Schedule make_reduce_scatter_v_schedule(Rank rank, std::span<const uint64_t> counts);

// Returns the part of a rank if `count` elements are divided among all ranks: each of the first
// count % world_size parts has one element more.
Block part_of(uint64_t count, int world_size, Rank rank);

}  // namespace cadre
