// What is tried: one case for each collective, dtype, operation and count, and the numbers that
// each rank brings to it.
//
// Threads: pure functions. Blocking: never. Errors: none.
// The numbers are small whole ones, exact in every dtype and in every order of additions, so that
// what must come out is a formula of ranks and indices, worked out here without communication.
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

// All cases of a world, the same on all ranks; every collective of the table in collectives.h.
std::vector<Case> cases_for(int world_size);

// Elements begin .. begin + count - 1 of what the rank brings: `numbers` by the formula, `noise`
// finite random floats of widely differing sizes, and any bits as integers.
std::vector<std::byte> numbers(const Case& c, Rank rank, int world_size, uint64_t begin,
                               uint64_t count);
std::vector<std::byte> noise(const Case& c, Rank rank, uint64_t count);

// What premul_sum multiplies the rank's numbers by.
double factor_of(Rank rank);

// Elements begin .. begin + count - 1 of the reduction over all ranks' numbers.
// REQUIRES: the pair is supported.
std::vector<std::byte> reduced(const Case& c, int world_size, uint64_t begin, uint64_t count);

}  // namespace cadre::conformance
