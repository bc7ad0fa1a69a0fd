#include "cadre/core/collective/scale.h"

#include <type_traits>

#include "cadre/core/collective/map_kernels.h"

namespace cadre {
namespace {

struct Multiply {
  template <typename V>
  CADRE_KERNEL_INLINE void apply(V& vector, double factor) {
    using Element = std::remove_cvref_t<decltype(vector[0])>;
    vector *= static_cast<Element>(factor);
  }
};

template <typename Lanes>
void run(const kernels::Map& map, InstructionSet set) {
  kernels::run_with<kernels::MapKernel<Lanes, Lanes, Multiply>>(set, map);
}

}  // namespace

void scale(std::byte* out, const std::byte* in, size_t count, DType dtype, double factor,
           InstructionSet set) {
  const kernels::Map map{out, in, count, factor};
  switch (dtype) {
    case DType::kFloat16:
      return run<kernels::Float16Lanes>(map, set);
    case DType::kBfloat16:
      return run<kernels::Bfloat16Lanes>(map, set);
    case DType::kFloat32:
      return run<kernels::Lanes<float>>(map, set);
    case DType::kFloat64:
      return run<kernels::Lanes<double>>(map, set);
    case DType::kUint8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kBool:
      break;
  }
}

}  // namespace cadre
