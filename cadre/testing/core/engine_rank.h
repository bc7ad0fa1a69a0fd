// One rank's NetEngine and its counter of operations, for tests; and elements of any dtype.
//
// Threads: one thread for each rank. Blocking: every operation, until its deadline. Lifetime:
// borrows the System and the Transport.
#pragma once

#include <vector>

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

// Appends a number, converted to the dtype. Only float16 and bfloat16 may round it; in other dtypes
// it must be representable.
inline void append_element(std::vector<std::byte>& bytes, DType dtype, double value) {
  bytes.resize(bytes.size() + size_of(dtype));
  testing::write_number(bytes, bytes.size() / size_of(dtype) - 1, dtype, value);
}

}  // namespace cadre
