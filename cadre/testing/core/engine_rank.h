// One rank's NetEngine and its counter of operations, for tests; and elements of any dtype.
//
// Threads: one thread for each rank. Blocking: every operation, until its deadline. Lifetime:
// borrows the System and the Transport.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "cadre/core/base/random.h"
#include "cadre/core/collective/net/net_engine.h"
#include "cadre/testing/core/engine_caller.h"
#include "cadre/testing/core/reference_reduction.h"

namespace cadre {

inline constexpr int kMaxRanks = 9;  // the largest world size in these tests

class EngineRank final : public EngineCaller {
 public:
  EngineRank(os::System& system, Transport& transport, const CrossoverTable& table = {})
      : EngineCaller(system, transport.rank(), transport.world_size()),
        engine_(system, transport, table) {}

  NetEngine& engine() override { return engine_; }

  Status all_reduce(ConstBytes in, Bytes out, DType dtype, ReduceOp op) {
    return run(Collective::all_reduce(in, out, dtype, op));
  }
  Status reduce_scatter(ConstBytes in, Bytes out, DType dtype, ReduceOp op) {
    return run(Collective::reduce_scatter(in, out, dtype, op));
  }

 private:
  NetEngine engine_;
};

inline constexpr uint64_t kElementSeed = 0x5eed;

// Returns element `index` of the input of a rank, rounded to the dtype. The elements have very
// different magnitudes, so that another order of additions gives other rounding errors.
inline float uneven_element(int rank, uint64_t index, DType dtype = DType::kFloat32) {
  Random random(kElementSeed + static_cast<uint64_t>(rank) * 100'003 + index);
  const auto exponent = static_cast<int>(random.below(24)) - 12;
  const float value = std::ldexp(static_cast<float>(random.unit()) - 0.5F, exponent);
  if (dtype == DType::kFloat32) return value;
  return testing::from_half(testing::to_half(value, dtype), dtype);
}

// Appends a number, converted to the dtype. Only float16 and bfloat16 may round it; in other dtypes
// it must be representable.
inline void append_element(std::vector<std::byte>& bytes, DType dtype, double value) {
  bytes.resize(bytes.size() + size_of(dtype));
  testing::write_number(bytes, bytes.size() / size_of(dtype) - 1, dtype, value);
}

}  // namespace cadre
