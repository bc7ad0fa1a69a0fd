// One step of a simulated job: a collective, two collectives in two groups at once, or an exchange
// of messages. A seed determines its values.
//
// Threads: plain values. Blocking: never.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace cadre::testing {

// A message between two ranks. The k-th receive from a sender with a tag gets the k-th message of
// that sender with that tag.
struct Letter {
  int from = 0;
  int to = 0;
  int tag = 0;
  size_t num_bytes = 0;
  uint64_t content = 0;  // the seed of the message's bytes
};

struct Step {
  enum class Kind {
    kAllReduce,
    kAllGather,
    kReduceScatter,
    kBroadcast,
    kBarrier,
    kReduce,
    kGather,
    kScatter,
    kAllToAll,
    kAllToAllV,
    kAllGatherV,
    kReduceScatterV,
    kTwoGroups,
    kMessages,
  };
  static constexpr int kNumKinds = 14;

  Kind kind = Kind::kBarrier;
  uint64_t seed = 0;  // the seed of the values, and of the order in which each rank receives
  // The number of elements of each rank; for all_to_all approximately the sum over all ranks.
  size_t count = 0;
  int root = 0;  // used by kBroadcast, kReduce, kGather and kScatter
  // Whether inputs are in symmetric memory, and all_reduce and reduce work in place.
  bool is_symmetric = false;
  // Used by kMessages. A rank posts either all its receives before its first blocking send, or all
  // its sends before its first blocking receive; otherwise the ranks' calls could deadlock.
  std::vector<Letter> letters;
  bool blocks_in_sends = false;
  bool reduces_between = false;  // whether an all_reduce runs while messages are in flight
};

std::string_view to_string(Step::Kind kind);

}  // namespace cadre::testing
