// One step of a simulated job: a collective, two collectives in two groups at once, or an exchange
// of messages. A seed picks its values.
//
// Threads: plain values. Blocking: never.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace cadre::testing {

// A message. The k-th receive from a sender with a tag gets the k-th message of that sender with
// the tag.
struct Letter {
  int from = 0;
  int to = 0;
  int tag = 0;
  size_t num_bytes = 0;
  uint64_t content = 0;  // determines the bytes of the message
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
  uint64_t seed = 0;  // the seed of the values, and of each rank's order of receives
  // Elements per rank; in all_to_all approximately the elements of all ranks together.
  size_t count = 0;
  int root = 0;  // used by kBroadcast, kReduce, kGather and kScatter
  // Inputs are in symmetric memory, and all_reduce and reduce work in place.
  bool is_symmetric = false;
  // Used by kMessages. A rank posts either all receives before its first blocking send, or all
  // sends before its first blocking receive. Otherwise ranks could deadlock by the order of their
  // own calls.
  std::vector<Letter> letters;
  bool blocks_in_sends = false;
  bool reduces_between = false;  // runs an all_reduce while messages are in flight
};

std::string_view to_string(Step::Kind kind);

}  // namespace cadre::testing
