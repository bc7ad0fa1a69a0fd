// Runs every collective with each dtype, reduction and count on 1 to 9 ranks in each of several
// places, and checks:
// - Small integers give the results of the formulas in cases.h.
// - Random floats give the same bits on all ranks, in a second run, and in every place with the
//   same order of additions.
// - An unsupported pair of dtype and reduction gives the documented error, and the group stays
//   usable.
//
// Threads: one; see settings.h. Blocking: until all ranks have ended. Errors: printed.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "cadre/core/base/types.h"
#include "cadre/testing/core/seeds.h"
#include "collectives.h"
#include "settings.h"

namespace cadre::conformance {

struct Choice {
  uint64_t one_in = 1;
  uint64_t seed = testing::cases_seed();
  int max_ranks = 9;
};

// Where the ranks run, and in which memory.
struct Place {
  std::string name;
  // Places with equal numbers add in the same order, so their results have the same bits.
  int order_of_additions = 0;
  std::function<testing::RanksResult(int world_size, uint64_t seed, const GroupMain& group_main)>
      run_group;
  RunCall run_call = run_on_cpu;
  // Returns whether the engine refuses a reduction that reduction_table.h has; null: none.
  bool (*refuses)(DType dtype, ReduceOp op) = nullptr;
};

// Parses --one-in, --seed and --max-ranks with a number each. Returns false for an unknown flag or
// an invalid number.
bool parse(int argc, char** argv, Choice& choice);

// Prints a line for each place and world size, and the number of cases. Returns the exit code: 1 if
// a case failed.
int run_conformance(std::span<const Place> places, const Choice& choice);

}  // namespace cadre::conformance
