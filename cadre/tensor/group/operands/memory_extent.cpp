#include "cadre/tensor/group/operands/memory_extent.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>

namespace cadre {

MemoryExtent memory_extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const auto size = static_cast<int64_t>(tensor.element_size());
  // The first address on the meta device is often 0, and adding to a null pointer is undefined.
  const uintptr_t begin = tensor.is_meta() ? static_cast<uintptr_t>(tensor.storage_offset() * size)
                                           : reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const uintptr_t end = begin + static_cast<uintptr_t>((last + 1) * size);
  return {reinterpret_cast<const std::byte*>(begin), reinterpret_cast<const std::byte*>(end)};
}

std::vector<std::vector<size_t>> connected_extents(std::span<const MemoryExtent> extents) {
  std::vector<size_t> order(extents.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::less<>(), [&](size_t i) { return extents[i].begin; });
  std::vector<std::vector<size_t>> sets;
  const std::byte* end = nullptr;  // where the newest set ends
  for (const size_t i : order) {
    if (sets.empty() || extents[i].begin >= end) {
      sets.emplace_back();
      end = extents[i].end;
    }
    sets.back().push_back(i);
    end = std::max(end, extents[i].end);
  }
  return sets;
}

}  // namespace cadre
