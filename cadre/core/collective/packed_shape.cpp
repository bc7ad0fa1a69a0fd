#include "cadre/core/collective/packed_shape.h"

#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"

namespace cadre {
namespace {

constexpr int kNibbleBits = 4;
constexpr int kWordBits = 64;
constexpr uint64_t kNibbleMask = 0xf;
// The number of bits of a size in a nibble; the fourth bit says that more follow.
constexpr int kSizeBits = 3;
constexpr uint64_t kSizeMask = 7;
constexpr uint64_t kMore = 8;
constexpr uint64_t kDigest = 15;

uint64_t digest(std::span<const int64_t> sizes) {
  Fnv1a hash;
  for (const int64_t size : sizes) hash.add(static_cast<uint64_t>(size));
  return kDigest | hash.value() << kNibbleBits;
}

uint64_t pack(std::span<const int64_t> sizes) {
  if (sizes.size() == 1) return 0;
  if (sizes.size() + 1 >= kDigest) return digest(sizes);
  uint64_t bits = sizes.size() + 1;
  int at = kNibbleBits;
  for (const int64_t size : sizes) {
    auto left = static_cast<uint64_t>(size);
    do {
      if (at == kWordBits) return digest(sizes);
      const uint64_t low = left & kSizeMask;
      left >>= kSizeBits;
      bits |= (left == 0 ? low : low | kMore) << at;
      at += kNibbleBits;
    } while (left != 0);
  }
  return bits;
}

}  // namespace

PackedShape::PackedShape(std::span<const int64_t> sizes) : bits_(pack(sizes)) {}

PackedShape PackedShape::from_bits(uint64_t bits) {
  PackedShape shape;
  shape.bits_ = bits;
  return shape;
}

std::string PackedShape::to_string(uint64_t num_elements) const {
  const uint64_t tag = bits_ & kNibbleMask;
  if (tag == 0) return format("x {}", num_elements);
  if (tag == kDigest) return format("x {}, shape #{:x}", num_elements, bits_ >> kNibbleBits);
  std::string text = "x [";
  int at = kNibbleBits;
  for (uint64_t dimension = 0; dimension + 1 < tag; ++dimension) {
    uint64_t size = 0;
    uint64_t nibble = kMore;
    for (int shift = 0; (nibble & kMore) != 0 && at < kWordBits; shift += kSizeBits) {
      nibble = bits_ >> at & kNibbleMask;
      size |= (nibble & kSizeMask) << shift;
      at += kNibbleBits;
    }
    text += format("{}{}", dimension == 0 ? "" : ", ", size);
  }
  return text + "]";
}

}  // namespace cadre
