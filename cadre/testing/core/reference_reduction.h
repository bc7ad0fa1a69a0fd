// What a reduction must give, worked out one element at a time: the truth for tests of the kernels
// and of every engine.
//
// Threads: any. Blocking: never. Lifetime: values. Errors: none.
// Independent of core/collective/reduce: plain loops over scalars; float16 and bfloat16 are lists
// of numbers, rounded to by comparing exact distances; truth values are counted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cadre/core/collective/reduce.h"

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

// float16 or bfloat16, as `dtype` says. A NaN becomes the quiet one, 0x7e00 or 0x7fc0.
uint16_t to_half(float value, DType dtype);
float from_half(uint16_t code, DType dtype);

// Element i of the dtype; integers wrap, floats are rounded to nearest even.
void write_number(std::vector<std::byte>& bytes, size_t i, DType dtype, double value);

// Every pair that engines compute: the supported ones but for PREMUL_SUM, which comes to them as
// SUM.
std::vector<ReduceKind> all_reduce_kinds();

// A third of all_reduce_kinds(), another for each of three world sizes in a row, and of these the
// share of this run (seeds.h): for tests that try many worlds. Every kind in every world is the
// conformance program's.
std::vector<ReduceKind> reduce_kinds_in(int world_size);

// Integers of any bits; finite floats of widely differing sizes, so that the order of the additions
// shows in the result.
Inputs random_inputs(size_t num_inputs, size_t count, DType dtype, uint64_t seed);

// The fold of all inputs in their order; one input as it is. REQUIRES: at least one input; all of
// one size.
std::vector<std::byte> reference_reduction(const Inputs& inputs, ReduceKind kind);

// Each element times the factor. REQUIRES: a floating-point dtype.
std::vector<std::byte> reference_scaling(const std::vector<std::byte>& input, DType dtype,
                                         double factor);

}  // namespace cadre::testing
