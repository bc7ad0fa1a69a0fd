#include "cadre/train/data/content_hash.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace cadre {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5;

// Removes the first bytes of the text and returns them as a number.
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

uint64_t joined(const std::array<uint64_t, 4>& lanes) {
  uint64_t hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
                  std::rotl(lanes[3], 18);
  for (const uint64_t lane : lanes) hash = (hash ^ round_of(0, lane)) * kPrime1 + kPrime4;
  return hash;
}

}  // namespace

ContentHash::ContentHash() : lanes_{kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1} {}

void ContentHash::add_stripe(const char* stripe) {
  std::string_view bytes(stripe, kStripeBytes);
  for (uint64_t& lane : lanes_) lane = round_of(lane, take<uint64_t>(bytes));
}

void ContentHash::add(std::string_view bytes) {
  const size_t num_rest = num_bytes_ % kStripeBytes;
  num_bytes_ += bytes.size();
  if (num_rest > 0) {
    const std::string_view first = bytes.substr(0, kStripeBytes - num_rest);
    std::ranges::copy(first, rest_.data() + num_rest);
    bytes.remove_prefix(first.size());
    if (num_rest + first.size() < kStripeBytes) return;
    add_stripe(rest_.data());
  }
  for (; bytes.size() >= kStripeBytes; bytes.remove_prefix(kStripeBytes)) add_stripe(bytes.data());
  std::ranges::copy(bytes, rest_.data());
}

uint64_t ContentHash::value() const {
  std::string_view bytes(rest_.data(), num_bytes_ % kStripeBytes);
  uint64_t hash = (num_bytes_ >= kStripeBytes ? joined(lanes_) : kPrime5) + num_bytes_;
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

uint64_t content_hash(std::string_view bytes) {
  ContentHash hash;
  hash.add(bytes);
  return hash.value();
}

}  // namespace cadre
