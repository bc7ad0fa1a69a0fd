// The loops behind reduce(), written once over vectors and compiled for each instruction set.
//
// Threads: any. Blocking: never. Private to the reductions of this folder.
// A remainder shorter than a vector uses the same instructions, padded with zeros, so that an
// element's bits do not depend on its position.
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "cadre/core/collective/lanes.h"

namespace cadre::kernels {

struct Sum {
  template <typename V>
  CADRE_KERNEL_INLINE void apply(V& total, const V& next) {
    total += next;
  }
};

struct Product {
  template <typename V>
  CADRE_KERNEL_INLINE void apply(V& total, const V& next) {
    total *= next;
  }
};

struct And {
  template <typename V>
  CADRE_KERNEL_INLINE void apply(V& total, const V& next) {
    total &= next;
  }
};

struct Or {
  template <typename V>
  CADRE_KERNEL_INLINE void apply(V& total, const V& next) {
    total |= next;
  }
};

struct Xor {
  template <typename V>
  CADRE_KERNEL_INLINE void apply(V& total, const V& next) {
    total ^= next;
  }
};

// `total != total` tests for NaN. It is false for integers, and the compiler removes it there.
struct Min {
  template <typename V>
  CADRE_KERNEL_INLINE void apply(V& total, const V& next) {
    total = ((total < next) | (total != total)) ? total : next;
  }
};

struct Max {
  template <typename V>
  CADRE_KERNEL_INLINE void apply(V& total, const V& next) {
    total = ((total > next) | (total != total)) ? total : next;
  }
};

// Stores the folded value as it is. AsIs and DivideByNumInputs are the choices for the last step of
// a fold.
struct AsIs {
  template <typename V>
  CADRE_KERNEL_INLINE void apply(V&, size_t) {}
};

// A multiplication by the reciprocal of a power of two rounds exactly as the division, and is
// several times faster.
struct DivideByNumInputs {
  template <typename V>
  CADRE_KERNEL_INLINE void apply(V& total, size_t num_inputs) {
    using Element = std::remove_cvref_t<decltype(total[0])>;
    const auto divisor = static_cast<Element>(num_inputs);
    if ((num_inputs & (num_inputs - 1)) == 0) {
      total *= Element{1} / divisor;
    } else {
      total /= divisor;
    }
  }
};

struct Fold {
  std::byte* out;
  const std::byte* const* inputs;
  size_t num_inputs;
  size_t count;
};

template <typename L, typename Op, typename Finish>
struct FoldLoop {
  using V = typename L::Accumulator;

  CADRE_KERNEL_INLINE void run(const Fold& fold) {
    const size_t num_vectors = fold.count / L::kNumLanes;
    size_t i = 0;
    for (; i + 4 <= num_vectors; i += 4) four_vectors(fold, i * L::kStep);
    for (; i < num_vectors; ++i) one_vector(fold, i * L::kStep);
    if (const size_t rest = fold.count % L::kNumLanes; rest != 0) {
      tail(fold, num_vectors * L::kStep, rest * (L::kStep / L::kNumLanes));
    }
  }

 private:
  CADRE_KERNEL_INLINE void four_vectors(const Fold& fold, size_t at) {
    V a, b, c, d;
    const std::byte* first = fold.inputs[0] + at;
    L::load(a, first);
    L::load(b, first + L::kStep);
    L::load(c, first + 2 * L::kStep);
    L::load(d, first + 3 * L::kStep);
    for (size_t r = 1; r < fold.num_inputs; ++r) {
      const std::byte* next = fold.inputs[r] + at;
      accumulate(a, next);
      accumulate(b, next + L::kStep);
      accumulate(c, next + 2 * L::kStep);
      accumulate(d, next + 3 * L::kStep);
    }
    std::byte* to = fold.out + at;
    finish(to, a, fold.num_inputs);
    finish(to + L::kStep, b, fold.num_inputs);
    finish(to + 2 * L::kStep, c, fold.num_inputs);
    finish(to + 3 * L::kStep, d, fold.num_inputs);
  }

  CADRE_KERNEL_INLINE void one_vector(const Fold& fold, size_t at) {
    V total;
    L::load(total, fold.inputs[0] + at);
    for (size_t r = 1; r < fold.num_inputs; ++r) accumulate(total, fold.inputs[r] + at);
    finish(fold.out + at, total, fold.num_inputs);
  }

  CADRE_KERNEL_INLINE void tail(const Fold& fold, size_t at, size_t num_bytes) {
    std::byte padded[L::kStep] = {};
    std::memcpy(padded, fold.inputs[0] + at, num_bytes);
    V total;
    L::load(total, padded);
    for (size_t r = 1; r < fold.num_inputs; ++r) {
      std::memcpy(padded, fold.inputs[r] + at, num_bytes);
      accumulate(total, padded);
    }
    finish(padded, total, fold.num_inputs);
    std::memcpy(fold.out + at, padded, num_bytes);
  }

  CADRE_KERNEL_INLINE void accumulate(V& total, const std::byte* from) {
    V next;
    L::load(next, from);
    Op::apply(total, next);
  }

  CADRE_KERNEL_INLINE void finish(std::byte* to, V& total, size_t num_inputs) {
    Finish::apply(total, num_inputs);
    L::store(to, total);
  }
};

template <typename L, typename Op, typename Finish>
struct Kernel {
  template <InstructionSet kSet>
  CADRE_KERNEL_INLINE void run(const Fold& fold) {
    FoldLoop<typename LanesFor<L, kSet>::Type, Op, Finish>::run(fold);
  }
};

}  // namespace cadre::kernels
