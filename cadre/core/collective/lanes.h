// How the elements of each dtype are moved between memory and vector registers, for all kernels.
//
// Threads: any. Blocking: never. Private to the kernels of this folder.
// All functions here are always inlined into a function that has the target attribute, so the same
// source becomes SSE2, AVX2 and AVX-512 code. Vectors are the vector extension of GCC and clang,
// with plain operators, so nothing depends on the auto-vectoriser.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cadre/core/collective/instruction_set.h"

#if defined(__x86_64__) && !defined(__clang__)
#include <immintrin.h>  // declares the builtins of instruction sets that are off by default
#endif

#define CADRE_KERNEL_INLINE [[gnu::always_inline]] static inline

namespace cadre::kernels {

inline constexpr size_t kVectorBytes = 64;

template <typename T>
using Vector [[gnu::vector_size(kVectorBytes)]] = T;

// The elements are computed in the type in which they are stored.
template <typename T>
struct Lanes {
  using Accumulator = Vector<T>;
  static constexpr size_t kNumLanes = kVectorBytes / sizeof(T);
  // The size in bytes of a vector's elements in memory.
  static constexpr size_t kStep = kVectorBytes;

  CADRE_KERNEL_INLINE void load(Accumulator& vector, const std::byte* from) {
    std::memcpy(&vector, from, kStep);
  }
  CADRE_KERNEL_INLINE void store(std::byte* to, const Accumulator& vector) {
    std::memcpy(to, &vector, kStep);
  }
};

// The elements are bfloat16 in memory and float32 in registers. The rounding uses integers and not
// the CPU's own instruction (AVX512-BF16), which flushes denormals: bits must not depend on the
// CPU.
struct Bfloat16Lanes {
  using Accumulator = Vector<float>;
  using Words = Vector<uint32_t>;
  using Halves [[gnu::vector_size(kVectorBytes / 2)]] = uint16_t;
  static constexpr size_t kNumLanes = kVectorBytes / sizeof(float);
  static constexpr size_t kStep = kVectorBytes / 2;

  CADRE_KERNEL_INLINE void load(Accumulator& vector, const std::byte* from) {
    Halves halves;
    std::memcpy(&halves, from, kStep);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    std::memcpy(&vector, &words, sizeof(words));
  }
  CADRE_KERNEL_INLINE void store(std::byte* to, const Accumulator& vector) {
    Words bits;
    std::memcpy(&bits, &vector, sizeof(bits));
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words quiet_nan = Words{} + 0x7fc0;
    const Words chosen = vector != vector ? quiet_nan : rounded;
    const Halves halves = __builtin_convertvector(chosen, Halves);
    std::memcpy(to, &halves, kStep);
  }
};

// The elements are float16 in memory and float32 in registers. Both conversions use integers: they
// run on any CPU, and the flags of the CPU (FTZ, DAZ) cannot change a bit. The two floating-point
// additions have no denormal result, and a denormal operand cannot change their result.
struct PortableFloat16Lanes {
  using Accumulator = Vector<float>;
  using Words = Vector<int32_t>;
  using Halves [[gnu::vector_size(kVectorBytes / 2)]] = uint16_t;
  static constexpr size_t kNumLanes = kVectorBytes / sizeof(float);
  static constexpr size_t kStep = kVectorBytes / 2;

  CADRE_KERNEL_INLINE void load(Accumulator& vector, const std::byte* from) {
    Halves halves;
    std::memcpy(&halves, from, kStep);
    const Words words = __builtin_convertvector(halves, Words);
    const Words magnitude = (words & 0x7fff) << 13;
    const Words sign = (words & 0x8000) << 16;
    const Words normal = magnitude + kExponentShift;
    // A denormal is m * 2^-24: the difference of 2^-14 * (1 + m * 2^-10) and 2^-14.
    const Words above = magnitude + (kExponentShift + kFloatOne);
    const Words denormal = reinterpret_cast<Words>(reinterpret_cast<Accumulator>(above) - 0x1p-14F);
    const Words special = normal + kExponentShift;
    const Words finite = magnitude < kFloatOne ? denormal : normal;
    vector = reinterpret_cast<Accumulator>((magnitude < kSpecial ? finite : special) | sign);
  }

  CADRE_KERNEL_INLINE void store(std::byte* to, const Accumulator& vector) {
    const Words bits = reinterpret_cast<Words>(vector);
    const Words magnitude = bits & 0x7fffffff;
    const Words sign = (bits >> 16) & 0x8000;
    const Words normal = (magnitude - (kExponentShift - 0xfff) + ((magnitude >> 13) & 1)) >> 13;
    // Near 0.5 the float32 numbers are 2^-24 apart, like the denormals of float16: the addition
    // rounds to one of them.
    const Words denormal =
        reinterpret_cast<Words>(reinterpret_cast<Accumulator>(magnitude) + 0.5F) - kBitsOfHalf;
    const Words finite = magnitude < kLeastNormal ? denormal : normal;
    const Words infinite = Words{} + 0x7c00;
    const Words quiet_nan = Words{} + 0x7e00;
    const Words number = (magnitude < kTooLarge ? finite : infinite) | sign;
    const Words chosen = magnitude > kInfinity ? quiet_nan : number;
    const Halves halves = __builtin_convertvector(chosen, Halves);
    std::memcpy(to, &halves, kStep);
  }

 private:
  static constexpr int32_t kFloatOne = 1 << 23;         // the lowest bit of a float32's exponent
  static constexpr int32_t kExponentShift = 112 << 23;  // the exponent biases differ by 127 - 15
  // The exponent of infinities and NaNs, moved to its place in a float32.
  static constexpr int32_t kSpecial = 31 << 23;
  static constexpr int32_t kLeastNormal = 113 << 23;      // 2^-14
  static constexpr int32_t kBitsOfHalf = 126 << 23;       // 0.5
  static constexpr int32_t kTooLarge = (127 + 16) << 23;  // 2^16
  static constexpr int32_t kInfinity = 255 << 23;
};

#if defined(__x86_64__) && !defined(__clang__)
#define CADRE_CONVERTS_FLOAT16 1
// Converts like PortableFloat16Lanes, but with the CPU's own instructions, which are several times
// faster. They give the same bits: they ignore FTZ and have a fixed rounding, and DAZ affects only
// values that round to zero anyway. They would keep the payload of a NaN, so NaNs are replaced
// first. The code uses builtins instead of intrinsics: intrinsics are functions of one target,
// which GCC cannot inline through callers without that target, and for which clang reports an
// error.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // a builtin returns in a register in every ABI
template <InstructionSet kSet>
struct ConvertingFloat16Lanes {
  using Accumulator = Vector<float>;
  static constexpr size_t kNumLanes = kVectorBytes / sizeof(float);
  static constexpr size_t kStep = kVectorBytes / 2;

  CADRE_KERNEL_INLINE void load(Accumulator& vector, const std::byte* from) {
    if constexpr (kSet == InstructionSet::kAvx512) {
      Half16 halves;
      std::memcpy(&halves, from, kStep);
      vector = __builtin_ia32_vcvtph2ps512_mask(halves, Accumulator{}, 0xffff, kCurrentDirection);
    } else {
      Half8 halves[2];
      std::memcpy(halves, from, kStep);
      const Float8 floats[2] = {__builtin_ia32_vcvtph2ps256(halves[0]),
                                __builtin_ia32_vcvtph2ps256(halves[1])};
      std::memcpy(&vector, floats, sizeof(vector));
    }
  }
  CADRE_KERNEL_INLINE void store(std::byte* to, const Accumulator& vector) {
    const Accumulator quiet_nan = Accumulator{} + __builtin_nanf("");
    const Accumulator chosen = vector != vector ? quiet_nan : vector;
    if constexpr (kSet == InstructionSet::kAvx512) {
      const Half16 halves =
          __builtin_ia32_vcvtps2ph512_mask(chosen, kNearestEven, Half16{}, 0xffff);
      std::memcpy(to, &halves, kStep);
    } else {
      Float8 floats[2];
      std::memcpy(floats, &chosen, sizeof(chosen));
      const Half8 halves[2] = {__builtin_ia32_vcvtps2ph256(floats[0], kNearestEven),
                               __builtin_ia32_vcvtps2ph256(floats[1], kNearestEven)};
      std::memcpy(to, halves, kStep);
    }
  }

 private:
  using Half8 [[gnu::vector_size(16)]] = int16_t;
  using Half16 [[gnu::vector_size(32)]] = int16_t;
  using Float8 [[gnu::vector_size(32)]] = float;
  static constexpr int kNearestEven = 0;
  static constexpr int kCurrentDirection = 4;  // the current rounding mode, as widening is exact
};
#pragma GCC diagnostic pop
#endif

// A placeholder in the type of a kernel. LanesFor replaces it with the float16 lanes for the
// instruction set for which the kernel is compiled.
struct Float16Lanes {};

template <typename L, InstructionSet kSet>
struct LanesFor {
  using Type = L;
};
template <InstructionSet kSet>
struct LanesFor<Float16Lanes, kSet> {
#ifdef CADRE_CONVERTS_FLOAT16
  using Type = std::conditional_t<kSet == InstructionSet::kBaseline, PortableFloat16Lanes,
                                  ConvertingFloat16Lanes<kSet>>;
#else
  using Type = PortableFloat16Lanes;
#endif
};

// A value is one byte: every value except 0 is true, and true is stored as 1.
struct BoolLanes {
  using Accumulator = Vector<uint8_t>;
  static constexpr size_t kNumLanes = kVectorBytes;
  static constexpr size_t kStep = kVectorBytes;

  CADRE_KERNEL_INLINE void load(Accumulator& vector, const std::byte* from) {
    Accumulator bytes;
    std::memcpy(&bytes, from, kStep);
    const Accumulator yes = Accumulator{} + 1;
    vector = bytes != 0 ? yes : Accumulator{};
  }
  CADRE_KERNEL_INLINE void store(std::byte* to, const Accumulator& vector) {
    std::memcpy(to, &vector, kStep);
  }
};

}  // namespace cadre::kernels
