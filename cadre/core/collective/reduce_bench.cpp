// Measures the speed of sums by reduce(): bytes read and written in a second, for each dtype,
// number of inputs and bytes of each input. A memory-bound sum of float16 or bfloat16 should move
// as many bytes in a second as one of float32.
//
//   reduce_bench [--benchmark_filter=float16]
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/reduce.h"
#include "cadre/testing/core/reference_reduction.h"

namespace cadre {
namespace {

struct Shape {
  size_t num_inputs = 2;
  size_t num_bytes = 0;
};

void sum(benchmark::State& state, DType dtype, const Shape& shape) {
  const size_t count = shape.num_bytes / size_of(dtype);
  // A short sequence of random numbers, repeated: the speed does not depend on the values.
  const auto pattern = testing::random_inputs(1, 1024, dtype, 1)[0];
  std::vector<std::vector<std::byte>> inputs(shape.num_inputs,
                                             std::vector<std::byte>(shape.num_bytes));
  std::vector<const std::byte*> pointers;
  for (auto& input : inputs) {
    for (size_t i = 0; i < input.size(); ++i) input[i] = pattern[i % pattern.size()];
    pointers.push_back(input.data());
  }
  std::vector<std::byte> out(shape.num_bytes);
  for (auto _ : state) {
    reduce(out.data(), pointers, count, {dtype, ReduceOp::kSum});
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }
  const auto moved = static_cast<int64_t>((shape.num_inputs + 1) * shape.num_bytes);
  state.SetBytesProcessed(state.iterations() * moved);
}

void register_all() {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16, DType::kInt8}) {
    for (const size_t num_inputs : {size_t{2}, size_t{4}}) {
      for (const size_t num_bytes : {size_t{4} << 10, size_t{128} << 10, size_t{32} << 20}) {
        const Shape shape{num_inputs, num_bytes};
        const std::string name = format("sum/{}/{}x{}", dtype, num_inputs, num_bytes);
        benchmark::RegisterBenchmark(
            name.c_str(), [dtype, shape](benchmark::State& state) { sum(state, dtype, shape); });
      }
    }
  }
}

}  // namespace
}  // namespace cadre

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  cadre::register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
