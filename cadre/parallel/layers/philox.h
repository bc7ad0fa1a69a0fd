// Philox4x32-10, a counter-based random generator: a pure function that maps a key and a counter to
// 128 random bits. If a program numbers its random draws, it can compute each draw without the
// earlier ones, on any rank and in any order. Not suitable for cryptography.
//
// The values are the same on every platform. Source: Salmon, Moraes, Dror, Shaw, "Parallel Random
// Numbers: As Easy as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstdint>

namespace cadre {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

inline constexpr std::array<uint32_t, 2> kPhiloxFactors = {0xd2511f53, 0xcd9e8d57};
inline constexpr PhiloxKey kPhiloxKeySteps = {0x9e3779b9, 0xbb67ae85};
inline constexpr int kPhiloxRounds = 10;

// Computes ten rounds. Each round multiplies two words of the counter and XORs the key into the
// result; after each round a constant is added to each word of the key (a Weyl sequence).
constexpr PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t first = uint64_t{kPhiloxFactors[0]} * counter[0];
    const uint64_t second = uint64_t{kPhiloxFactors[1]} * counter[2];
    counter = {
        static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(second),
        static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(first)};
    key[0] += kPhiloxKeySteps[0];
    key[1] += kPhiloxKeySteps[1];
  }
  return counter;
}

}  // namespace cadre
