// A loop over one input, element by element, which scales, divides, widens or narrows.
//
// Threads: any. Blocking: never. Private to the kernels of this folder and its engines.
// A remainder shorter than a vector uses the same instructions, padded with zeros, as in
// reduce_kernels.h.
#pragma once

#include <cstddef>
#include <cstring>

#include "cadre/core/collective/instruction_set.h"
#include "cadre/core/collective/lanes.h"

namespace cadre::kernels {

struct Map {
  std::byte* out;
  const std::byte* in;
  size_t count;
  double operand;
};

// The loop loads a vector as In, calls Change::apply(vector, operand), and stores the vector as
// Out.
template <typename In, typename Out, typename Change>
struct MapLoop {
  static_assert(In::kNumLanes == Out::kNumLanes);
  using V = typename In::Accumulator;

  CADRE_KERNEL_INLINE void run(const Map& map) {
    const size_t num_vectors = map.count / In::kNumLanes;
    for (size_t i = 0; i < num_vectors; ++i) {
      one_vector(map.out + i * Out::kStep, map.in + i * In::kStep, map.operand);
    }
    const size_t rest = map.count % In::kNumLanes;
    if (rest == 0) return;
    std::byte padded_in[In::kStep] = {};
    std::byte padded_out[Out::kStep];
    std::memcpy(padded_in, map.in + num_vectors * In::kStep, rest * (In::kStep / In::kNumLanes));
    one_vector(padded_out, padded_in, map.operand);
    std::memcpy(map.out + num_vectors * Out::kStep, padded_out,
                rest * (Out::kStep / Out::kNumLanes));
  }

 private:
  CADRE_KERNEL_INLINE void one_vector(std::byte* out, const std::byte* in, double operand) {
    V vector;
    In::load(vector, in);
    Change::apply(vector, operand);
    Out::store(out, vector);
  }
};

template <typename In, typename Out, typename Change>
struct MapKernel {
  template <InstructionSet kSet>
  CADRE_KERNEL_INLINE void run(const Map& map) {
    MapLoop<typename LanesFor<In, kSet>::Type, typename LanesFor<Out, kSet>::Type, Change>::run(
        map);
  }
};

}  // namespace cadre::kernels
