// Computes the expected result of a reduction, one element at a time, for tests of the reduction
// kernels and of every engine.
//
// Shares no code with core/collective/reduce. It has plain loops over scalars; float16 and bfloat16
// are tables of numbers, rounding compares exact distances, and booleans are counted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cadre/core/collective/reduce.h"

namespace cadre::testing {

// The inputs of a reduction: one buffer for each rank.
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

// to_half() and from_half() convert float to and from `dtype`, which is float16 or bfloat16. A NaN
// becomes the quiet NaN, 0x7e00 or 0x7fc0.
uint16_t to_half(float value, DType dtype);
float from_half(uint16_t code, DType dtype);

// Writes `value` as element i. Integers wrap; floating-point values are rounded to nearest even.
void write_number(std::vector<std::byte>& bytes, size_t i, DType dtype, double value);

// Returns every pair of dtype and operation that engines compute: all supported pairs except those
// with PREMUL_SUM, which engines get as SUM.
std::vector<ReduceKind> all_reduce_kinds();

// Returns a third of all_reduce_kinds(), a different third for each of three consecutive world
// sizes, and of that third only the subset that this run tests (seeds.h). Use it in tests that try
// many world sizes. The conformance program tests every pair in every world size.
std::vector<ReduceKind> reduce_kinds_in(int world_size);

// Returns random integers, or finite floating-point values whose magnitudes differ so much that the
// result depends on the order of the additions.
Inputs random_inputs(size_t num_inputs, size_t count, DType dtype, uint64_t seed);

// Reduces all inputs in rank order. A single input is returned unchanged. REQUIRES: at least one
// input, and all inputs have the same size.
std::vector<std::byte> reference_reduction(const Inputs& inputs, ReduceKind kind);

// Multiplies each element by the factor. REQUIRES: a floating-point dtype.
std::vector<std::byte> reference_scaling(const std::vector<std::byte>& input, DType dtype,
                                         double factor);

}  // namespace cadre::testing
