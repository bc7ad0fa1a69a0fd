// What the ranks of a simulated job do: collectives and messages that a seed picks, each result
// checked against its formula.
//
// Threads: as Communicator. Blocking: run_program, until every step is done or one fails.
// Errors: what the Communicator throws; kInternal for a wrong result.
#pragma once

#include <cstdint>
#include <vector>

#include "cadre/base/random.h"
#include "cadre/comm/communicator.h"

namespace cadre::testing {

// One message. The k-th receive of a (sender, tag) gets the k-th send.
struct Letter {
  int from = 0;
  int to = 0;
  int tag = 0;
  size_t num_bytes = 0;
  uint64_t content = 0;  // picks its bytes
};

struct Step {
  enum class Kind { kAllReduce, kAllGather, kReduceScatter, kBroadcast, kBarrier, kMessages };

  Kind kind = Kind::kBarrier;
  uint64_t seed = 0;      // of the values, and of each rank's order of receives
  size_t count = 0;       // elements of a rank
  int root = 0;           // of kBroadcast
  bool in_place = false;  // kAllReduce: in symmetric memory
  // Of kMessages. Either all receives are posted before the first blocking send, or all sends
  // before the first blocking receive: else ranks might wait for each other by right.
  std::vector<Letter> letters;
  bool blocks_in_sends = false;
  bool reduces_between = false;  // an all_reduce while messages are under way
};

struct Program {
  std::vector<Step> steps;
};

// The same for all ranks. At least one step of messages, with sizes on both sides of the limit up
// to which a message travels at once, and one sum in symmetric memory.
Program make_program(uint64_t seed, int world_size);

// The part of group.rank().
void run_program(Communicator& group, const Program& program);

}  // namespace cadre::testing
