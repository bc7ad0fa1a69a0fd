#include "cadre/core/collective/net/elementwise.h"

#include "cadre/core/collective/map_kernels.h"
#include "cadre/core/collective/reduce_kernels.h"

namespace cadre {
namespace {

using kernels::Bfloat16Lanes;
using kernels::Float16Lanes;
using FloatLanes = kernels::Lanes<float>;

struct Divide {
  template <typename V>
  CADRE_KERNEL_INLINE void apply(V& vector, double divisor) {
    kernels::DivideByNumInputs::apply(vector, static_cast<size_t>(divisor));
  }
};

struct Keep {
  template <typename V>
  CADRE_KERNEL_INLINE void apply(V&, double) {}
};

template <typename In, typename Out, typename Change>
void run(const kernels::Map& map) {
  kernels::run_with<kernels::MapKernel<In, Out, Change>>(best_instruction_set(), map);
}

}  // namespace

void divide(std::byte* data, size_t count, DType dtype, int divisor) {
  const kernels::Map map{data, data, count, static_cast<double>(divisor)};
  if (dtype == DType::kFloat32) run<FloatLanes, FloatLanes, Divide>(map);
  if (dtype == DType::kFloat64) run<kernels::Lanes<double>, kernels::Lanes<double>, Divide>(map);
}

void widen(float* out, const std::byte* in, size_t count, DType dtype) {
  const kernels::Map map{reinterpret_cast<std::byte*>(out), in, count, 0};
  if (dtype == DType::kBfloat16) run<Bfloat16Lanes, FloatLanes, Keep>(map);
  if (dtype == DType::kFloat16) run<Float16Lanes, FloatLanes, Keep>(map);
}

void narrow(std::byte* out, const float* in, size_t count, DType dtype) {
  const kernels::Map map{out, reinterpret_cast<const std::byte*>(in), count, 0};
  if (dtype == DType::kBfloat16) run<FloatLanes, Bfloat16Lanes, Keep>(map);
  if (dtype == DType::kFloat16) run<FloatLanes, Float16Lanes, Keep>(map);
}

}  // namespace cadre
