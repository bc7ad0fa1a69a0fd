// The memory between the first and the last element of a tensor, and which tensors' extents
// overlap.
//
// Threads: pure functions. Blocking: never. Lifetime: addresses, valid as long as the tensor keeps
// its memory. Extents of tensors that interleave overlap, although they have no common element.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <vector>

namespace cadre {

struct MemoryExtent {
  const std::byte* begin;
  const std::byte* end;

  bool overlaps(const MemoryExtent& other) const { return begin < other.end && other.begin < end; }
};

// REQUIRES: a strided tensor that has elements, and has memory or is on the meta device. On the
// meta device the extent has offsets in the tensor's storage instead of addresses.
MemoryExtent memory_extent(const at::Tensor& tensor);

// Returns the indices of the extents, in sets: overlapping extents are in one set. The sets and the
// indices in them are in order of the extents' beginnings.
std::vector<std::vector<size_t>> connected_extents(std::span<const MemoryExtent> extents);

}  // namespace cadre
