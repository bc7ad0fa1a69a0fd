// The cases that are run: one for each collective, dtype, operation and count, with the numbers
// that each rank brings.
//
// Threads: pure functions. Blocking: never. Errors: none.
// The numbers are small and whole, so they are exact in every dtype and in every order of
// additions. The expected result is therefore a formula of ranks and indices, computed here without
// communication.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cadre/core/base/types.h"

namespace cadre::conformance {

struct Case {
  size_t collective = 0;  // index into collectives()
  DType dtype = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  uint64_t count = 0;
  Rank root = 0;

  std::string to_string() const;
};

// Returns all cases of a world, the same on all ranks, with every collective of the table in
// collectives.h.
std::vector<Case> cases_for(int world_size);

// Return elements begin .. begin + count - 1 of what the rank brings. `numbers` computes them by
// the formula. `noise` returns finite random floats of widely differing sizes, and integers with
// any bits.
std::vector<std::byte> numbers(const Case& c, Rank rank, int world_size, uint64_t begin,
                               uint64_t count);
std::vector<std::byte> noise(const Case& c, Rank rank, uint64_t count);

// Returns the number by which premul_sum multiplies the rank's numbers.
double factor_of(Rank rank);

// Returns elements begin .. begin + count - 1 of the reduction over all ranks' numbers. REQUIRES:
// the pair is supported.
std::vector<std::byte> reduced(const Case& c, int world_size, uint64_t begin, uint64_t count);

}  // namespace cadre::conformance
