#include "cadre/collective/net/elementwise.h"

#include <cstring>

#include "cadre/collective/reduce_kernels.h"

namespace cadre {
namespace {

using kernels::Bfloat16Lanes;

template <typename T>
void divide_as(std::byte* data, size_t count, int divisor) {
  using Lanes = kernels::Lanes<T>;
  const size_t num_bytes = count * sizeof(T);
  size_t at = 0;
  typename Lanes::Accumulator vector;
  for (; at + Lanes::kStep <= num_bytes; at += Lanes::kStep) {
    Lanes::load(vector, data + at);
    kernels::DivideByNumInputs::apply(vector, static_cast<size_t>(divisor));
    Lanes::store(data + at, vector);
  }
  if (at == num_bytes) return;
  std::memset(&vector, 0, sizeof(vector));
  std::memcpy(&vector, data + at, num_bytes - at);
  kernels::DivideByNumInputs::apply(vector, static_cast<size_t>(divisor));
  std::memcpy(data + at, &vector, num_bytes - at);
}

}  // namespace

void divide(std::byte* data, size_t count, DType dtype, int divisor) {
  if (dtype == DType::kFloat32) divide_as<float>(data, count, divisor);
  if (dtype == DType::kFloat64) divide_as<double>(data, count, divisor);
}

void widen(float* out, const std::byte* in, size_t count) {
  constexpr size_t kLanes = Bfloat16Lanes::kNumLanes;
  Bfloat16Lanes::Accumulator vector;
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Bfloat16Lanes::load(vector, in + 2 * i);
    std::memcpy(out + i, &vector, sizeof(vector));
  }
  if (i == count) return;
  std::byte padded[Bfloat16Lanes::kStep] = {};
  std::memcpy(padded, in + 2 * i, 2 * (count - i));
  Bfloat16Lanes::load(vector, padded);
  std::memcpy(out + i, &vector, sizeof(float) * (count - i));
}

void narrow(std::byte* out, const float* in, size_t count) {
  constexpr size_t kLanes = Bfloat16Lanes::kNumLanes;
  Bfloat16Lanes::Accumulator vector;
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    std::memcpy(&vector, in + i, sizeof(vector));
    Bfloat16Lanes::store(out + 2 * i, vector);
  }
  if (i == count) return;
  std::memset(&vector, 0, sizeof(vector));
  std::memcpy(&vector, in + i, sizeof(float) * (count - i));
  std::byte padded[Bfloat16Lanes::kStep];
  Bfloat16Lanes::store(padded, vector);
  std::memcpy(out + 2 * i, padded, 2 * (count - i));
}

}  // namespace cadre
