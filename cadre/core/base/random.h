// A small seeded random source for simulations, jitter and tests; not for secrets.
//
// Threads: one owner at a time. Blocking: never. The same seed gives the same sequence on every
// platform. Source: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
// generators", 2014).
#pragma once

#include <cstdint>

namespace cadre {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }

  // Returns a number that is uniform in [0, bound). REQUIRES: bound > 0. The bias is below bound /
  // 2^64.
  uint64_t below(uint64_t bound) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(next()) * bound) >> 64);
  }

  // Returns a number that is uniform in [0, 1).
  double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

 private:
  uint64_t state_;
};

}  // namespace cadre
