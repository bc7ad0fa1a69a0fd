// Lists the cases of the conformance program: one for each collective, dtype, operation and count,
// with the numbers that each rank contributes.
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

// Returns all cases of a world, which are equal on all ranks. They cover every collective of the
// table in collectives.h.
std::vector<Case> cases_for(int world_size);

// Return the elements [begin, begin + count) that the rank contributes. `numbers` computes them by
// the formula. `noise` returns finite random floats of widely differing magnitudes, and random
// integers.
std::vector<std::byte> numbers(const Case& c, Rank rank, int world_size, uint64_t begin,
                               uint64_t count);
std::vector<std::byte> noise(const Case& c, Rank rank, uint64_t count);

// Returns the factor by which PREMUL_SUM multiplies the rank's numbers.
double factor_of(Rank rank);

// Returns the elements [begin, begin + count) of the reduction over all ranks' numbers. REQUIRES:
// the pair of dtype and operation is supported.
std::vector<std::byte> reduced(const Case& c, int world_size, uint64_t begin, uint64_t count);

}  // namespace cadre::conformance
