#include "cadre/testing/torch/late_device/pinned_memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>

#include "cadre/testing/torch/late_device/runtime.h"

namespace cadre::testing::late {
namespace {

constexpr size_t kPinnedAlignment = 512;

}  // namespace

c10::DataPtr PinnedAllocator::allocate(size_t num_bytes) {
  const size_t rounded =
      (std::max<size_t>(num_bytes, 1) + kPinnedAlignment - 1) / kPinnedAlignment * kPinnedAlignment;
  const std::lock_guard lock(mutex_);
  for (auto& [address, block] : blocks_) {
    const auto has_happened = [](const auto& use) { return use->is_set(); };
    if (!block.is_free || block.num_bytes != rounded ||
        !std::all_of(block.uses.begin(), block.uses.end(), has_happened)) {
      continue;
    }
    block.uses.clear();
    block.is_free = false;
    char* const memory = block.memory.get();
    std::memset(memory, 0xFF, rounded);
    return {memory, memory, &free, c10::Device(c10::kCPU)};
  }
  const std::shared_ptr<char> memory(
      static_cast<char*>(std::aligned_alloc(kPinnedAlignment, rounded)), &std::free);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory.get(), 0xFF, rounded);
  blocks_[memory.get()] = {memory, rounded, {}, false};
  return {memory.get(), memory.get(), &free, c10::Device(c10::kCPU)};
}

const PinnedAllocator::Block* PinnedAllocator::find(const Blocks& blocks, const void* address) {
  const char* const wanted = static_cast<const char*>(address);
  auto found = blocks.upper_bound(wanted);
  if (found == blocks.begin()) return nullptr;
  --found;
  const Block& block = found->second;
  return !block.is_free && wanted < found->first + block.num_bytes ? &block : nullptr;
}

bool PinnedAllocator::contains(const void* address) const {
  const std::lock_guard lock(mutex_);
  return find(blocks_, address) != nullptr;
}

bool PinnedAllocator::record_event(void* address, void* /*context*/, c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  const Block* const block = find(blocks_, address);
  if (block == nullptr) return false;
  blocks_[block->memory.get()].uses.push_back(
      streams_.get(stream.device_index(), static_cast<int>(stream.id())).record());
  return true;
}

void PinnedAllocator::free(void* address) {
  runtime().pinned.free_block(address);
}

void PinnedAllocator::free_block(void* address) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(static_cast<char*>(address));
  if (found == blocks_.end()) return;
  Block& block = found->second;
  block.is_free = true;
  std::erase_if(block.uses, [](const auto& use) { return use->is_set(); });
  // A stream may still read or write the memory that an event protects.
  if (block.uses.empty()) std::memset(block.memory.get(), 0xFF, block.num_bytes);
}

void PinnedAllocator::copy_data(void* to, const void* from, size_t num_bytes) const {
  std::memcpy(to, from, num_bytes);
}

at::HostStats PinnedAllocator::get_stats() {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "late device: pinned memory has no statistics");
}

void PinnedAllocator::reset_accumulated_stats() {
  get_stats();
}

void PinnedAllocator::reset_peak_stats() {
  get_stats();
}

}  // namespace cadre::testing::late
