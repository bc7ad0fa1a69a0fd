// Computes the extent of a tensor, which is the memory from its first to its last element, and
// finds extents that overlap.
//
// Threads: pure functions. Blocking: never. Lifetime: addresses, valid as long as the tensor keeps
// its memory. The extents of two interleaved tensors (columns of a matrix) overlap although the
// tensors have no common element.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace cadre {

// Addresses are integers here, because a pointer into memory that does not exist is undefined.
struct MemoryExtent {
  uintptr_t begin;
  uintptr_t end;

  bool overlaps(const MemoryExtent& other) const { return begin < other.end && other.begin < end; }
};

// REQUIRES: a strided tensor that has elements, and has memory or is on the meta device. On the
// meta device the extent has offsets in the tensor's storage instead of addresses.
MemoryExtent memory_extent(const at::Tensor& tensor);

// Groups the extents into connected sets: extents that overlap, directly or through others, are in
// one set. Returns the sets as indices into `extents`; sets and indices are sorted by where the
// extents begin.
std::vector<std::vector<size_t>> connected_extents(std::span<const MemoryExtent> extents);

}  // namespace cadre
