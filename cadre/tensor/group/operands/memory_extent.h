// The memory between the first and the last element of a tensor, and which tensors' overlap.
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

// REQUIRES: a strided tensor with elements and memory, or on the meta device: there the extent is
// that of offsets in the tensor's storage.
MemoryExtent memory_extent(const at::Tensor& tensor);

// The indexes of the extents in sets that overlaps connect; each of a set of several overlaps
// another of it. Sets and the indexes in them are in order of the beginnings.
std::vector<std::vector<size_t>> connected_extents(std::span<const MemoryExtent> extents);

}  // namespace cadre
