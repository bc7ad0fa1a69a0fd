#include "cadre/train/checkpoint/planning/shared_memory.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/operands/memory_extent.h"

namespace cadre {
namespace {

// The bytes of memory that several target tensors cover, with the values that they will get.
class SharedBytes {
 public:
  SharedBytes(uintptr_t begin, int64_t num_bytes)
      : begin_(begin),
        owners_(at::full({num_bytes}, -1, at::kInt)),
        values_(at::zeros({num_bytes}, at::kByte)) {}

  void add(const PlannedWrite& write) {
    const at::Tensor values = bytes_of(write);
    const at::Tensor owners = bytes_at(owners_, write.target);
    const at::Tensor known = bytes_at(values_, write.target);
    const at::Tensor differ = owners.ge(0).logical_and(known.ne(values));
    if (differ.any().item<bool>()) {
      const auto owner = owners.masked_select(differ)[0].item<int>();
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("'{}' and '{}' share memory, for which they have different values: "
                                "one of them would be lost. Give each memory of its own, as "
                                "clone() does, or register one tensor under both names",
                                added_[static_cast<size_t>(owner)]->name, write.name));
    }
    owners.fill_(static_cast<int>(added_.size()));
    known.copy_(values);
    added_.push_back(&write);
  }

 private:
  // Returns the sizes of the target, followed by the number of bytes of an element.
  static std::vector<int64_t> sizes_in_bytes(const at::Tensor& target) {
    std::vector<int64_t> sizes = target.sizes().vec();
    sizes.push_back(static_cast<int64_t>(target.element_size()));
    return sizes;
  }
  static at::Tensor bytes_of(const PlannedWrite& write) {
    return write.values().view({-1, 1}).view(at::kByte).view(sizes_in_bytes(write.target));
  }
  at::Tensor bytes_at(const at::Tensor& memory, const at::Tensor& target) const {
    const auto item_bytes = static_cast<int64_t>(target.element_size());
    std::vector<int64_t> strides;
    for (const int64_t stride : target.strides()) strides.push_back(stride * item_bytes);
    strides.push_back(1);
    const uintptr_t offset = memory_extent(target).begin - begin_;
    return memory.as_strided(sizes_in_bytes(target), strides, static_cast<int64_t>(offset));
  }

  uintptr_t begin_;
  at::Tensor owners_;  // owners_[i] is the index in added_ of the last write to byte i; -1 if no
                       // write covers it
  at::Tensor values_;  // one value for each byte
  std::vector<const PlannedWrite*> added_;
};

}  // namespace

void check_shared_memory(std::span<const PlannedWrite> writes) {
  const at::NoGradGuard no_grad;
  std::vector<MemoryExtent> extents;
  std::vector<const PlannedWrite*> written;
  for (const PlannedWrite& write : writes) {
    if (write.target.numel() == 0) continue;
    extents.push_back(memory_extent(write.target));
    written.push_back(&write);
  }
  for (const std::vector<size_t>& connected : connected_extents(extents)) {
    if (connected.size() == 1) continue;
    const uintptr_t begin = extents[connected[0]].begin;
    uintptr_t end = begin;
    for (const size_t i : connected) end = std::max(end, extents[i].end);
    SharedBytes shared(begin, static_cast<int64_t>(end - begin));
    for (const size_t i : connected) shared.add(*written[i]);
  }
}

}  // namespace cadre
