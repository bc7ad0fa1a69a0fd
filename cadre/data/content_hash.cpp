#include "cadre/data/content_hash.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

namespace cadre {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5;
constexpr size_t kLaneBytes = 8;
constexpr size_t kStripeBytes = 4 * kLaneBytes;

// Takes the first bytes of the text as a number.
template <typename T>
T take(std::string_view& bytes) {
  T number = 0;
  std::memcpy(&number, bytes.data(), sizeof(number));
  bytes.remove_prefix(sizeof(number));
  return number;
}

uint64_t round_of(uint64_t lane, uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

// The hash of the whole stripes at the beginning of `bytes`, which are removed from it.
uint64_t hash_stripes(std::string_view& bytes) {
  std::array<uint64_t, 4> lanes = {kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1};
  while (bytes.size() >= kStripeBytes) {
    for (uint64_t& lane : lanes) lane = round_of(lane, take<uint64_t>(bytes));
  }
  uint64_t hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
                  std::rotl(lanes[3], 18);
  for (const uint64_t lane : lanes) hash = (hash ^ round_of(0, lane)) * kPrime1 + kPrime4;
  return hash;
}

}  // namespace

uint64_t content_hash(std::string_view bytes) {
  const uint64_t num_bytes = bytes.size();
  uint64_t hash = (num_bytes >= kStripeBytes ? hash_stripes(bytes) : kPrime5) + num_bytes;
  while (bytes.size() >= sizeof(uint64_t)) {
    hash = std::rotl(hash ^ round_of(0, take<uint64_t>(bytes)), 27) * kPrime1 + kPrime4;
  }
  if (bytes.size() >= sizeof(uint32_t)) {
    hash = std::rotl(hash ^ take<uint32_t>(bytes) * kPrime1, 23) * kPrime2 + kPrime3;
  }
  for (const char byte : bytes) {
    hash = std::rotl(hash ^ static_cast<unsigned char>(byte) * kPrime5, 11) * kPrime1;
  }
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace cadre
