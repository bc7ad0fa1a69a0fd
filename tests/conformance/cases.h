// The cases of the conformance program: one for each collective, dtype, reduction and count, with
// the numbers that each rank contributes.
//
// Threads: pure functions. Errors: none. The numbers are small integers, so they are exact in every
// dtype and their sum does not depend on the order of additions. The expected result is therefore
// computed by a formula of ranks and indices, without communication.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cadre/core/base/types.h"

namespace cadre::conformance {

struct Case {
  size_t collective = 0;  // index in collectives()
  DType dtype = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  uint64_t count = 0;
  Rank root = 0;

  std::string to_string() const;
};

// Returns all cases for this number of ranks; the list is equal on all ranks. It covers every
// collective in the table of collectives.h.
std::vector<Case> cases_for(int world_size);

// Return the elements [begin, begin + count) that the rank contributes. numbers() returns those of
// the formula; noise() returns finite random floats of widely differing magnitudes, or random
// integers.
std::vector<std::byte> numbers(const Case& c, Rank rank, int world_size, uint64_t begin,
                               uint64_t count);
std::vector<std::byte> noise(const Case& c, Rank rank, uint64_t count);

// Returns the factor by which PREMUL_SUM multiplies the rank's numbers.
double factor_of(Rank rank);

// Returns elements [begin, begin + count) of the reduction of all ranks' numbers. REQUIRES: the
// operation supports the dtype.
std::vector<std::byte> reduced(const Case& c, int world_size, uint64_t begin, uint64_t count);

}  // namespace cadre::conformance
