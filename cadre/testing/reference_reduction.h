// What a reduction must give, worked out one element at a time: the truth for tests of the kernels
// and of every engine.
//
// Threads: any. Blocking: never. Lifetime: values. Errors: none.
// Independent of collective/reduce: bfloat16 is rounded by comparing exact distances, not by bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cadre/collective/reduce.h"

namespace cadre::testing {

// One buffer for each rank.
using Inputs = std::vector<std::vector<std::byte>>;

template <typename T>
T read_element(const std::vector<std::byte>& bytes, size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void write_element(std::vector<std::byte>& bytes, size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
}

// Every supported pair.
std::vector<ReduceKind> all_reduce_kinds();

// Integers of any bits; finite floats of widely differing sizes, so that the order of the additions
// shows in the result.
Inputs random_inputs(size_t num_inputs, size_t count, DType dtype, uint64_t seed);

// The fold of all inputs in their order. REQUIRES: at least one input; all of one size.
std::vector<std::byte> reference_reduction(const Inputs& inputs, ReduceKind kind);

}  // namespace cadre::testing
