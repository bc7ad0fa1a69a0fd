// The table of collectives that the conformance program runs. cadre/testing/core/collective_call.h
// says what each rank passes and receives; barriers and messages have functions of their own.
//
// Threads: run() is called from the rank's thread; the rest are pure functions. Blocking: run().
// Errors: those of the Communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "cadre/core/comm/communicator.h"
#include "cadre/testing/core/collective_call.h"
#include "cases.h"

namespace cadre::conformance {

// Returns the first `count` elements that this rank contributes.
using Brought = std::function<std::vector<std::byte>(uint64_t count)>;

// Runs a call in the memory that is tested. `in` is this rank's input; `out` receives its result,
// and has the input of a broadcast.
using RunCall = std::function<void(Communicator& group, const testing::CollectiveCall& call,
                                   ConstBytes in, Bytes out)>;
// The RunCall for memory of the CPU.
void run_on_cpu(Communicator& group, const testing::CollectiveCall& call, ConstBytes in, Bytes out);

struct Tested {
  Communicator& group;
  const RunCall& run_call;
};

// Calls the collective of a case once, and returns this rank's result.
std::vector<std::byte> run_collective(const Tested& tested, const Case& c, const Brought& brought);
// Returns the expected result, computed by the formulas of cases.h.
std::vector<std::byte> expected_of_collective(const Case& c, Rank rank, int world_size);

struct CollectiveEntry {
  std::string_view name;
  OpKind kind = OpKind::kBarrier;
  bool has_data = true;  // false for a barrier, which has neither dtype nor count
  bool has_op = false;
  bool has_root = false;
  bool takes_count_per_rank = false;  // true if Case::count is the size of one rank's part
  // Whether all ranks get the same result. If so, its bits must be equal on all ranks even for
  // random floats.
  bool is_same_everywhere = false;
  decltype(run_collective)* run = run_collective;
  decltype(expected_of_collective)* expected = expected_of_collective;
};

std::span<const CollectiveEntry> collectives();

}  // namespace cadre::conformance
