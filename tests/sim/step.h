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

// One message. The k-th receive of a (sender, tag) gets the k-th send.
struct Letter {
  int from = 0;
  int to = 0;
  int tag = 0;
  size_t num_bytes = 0;
  uint64_t content = 0;  // determines its bytes
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
  uint64_t seed = 0;  // seed of the values, and of each rank's order of receives
  size_t count = 0;   // elements per rank; in all_to_all about as many for all ranks together
  int root = 0;       // for kBroadcast, kReduce, kGather and kScatter
  bool is_symmetric = false;  // inputs in symmetric memory; all_reduce and reduce work in place
  // Used by kMessages. Either all receives are posted before the first blocking send, or all sends
  // before the first blocking receive: otherwise ranks could deadlock by their own order.
  std::vector<Letter> letters;
  bool blocks_in_sends = false;
  bool reduces_between = false;  // run an all_reduce while messages are in flight
};

std::string_view to_string(Step::Kind kind);

}  // namespace cadre::testing
