#include "cadre/testing/torch/late_device/device_memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "cadre/testing/torch/late_device/runtime.h"

namespace cadre::testing::late {
namespace {

constexpr size_t kBlockAlignment = 512;
constexpr size_t kMappedBytes = MappedMemory::kDeviceBytes * kNumDevices;
// A block is used again for a request of at least half its size, within this slack.
constexpr size_t kSlackBytes = 4096;

}  // namespace

MappedMemory::MappedMemory() {
  const int file = memfd_create("late_device", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, kMappedBytes) == 0, "late device: no memory file of ",
              kMappedBytes, " bytes: ", std::strerror(errno));
  void* const device = mmap(nullptr, kMappedBytes, PROT_NONE, MAP_SHARED, file, 0);
  void* const host = mmap(nullptr, kMappedBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  TORCH_CHECK(device != MAP_FAILED && host != MAP_FAILED, "late device: cannot map ", kMappedBytes,
              " bytes twice: ", std::strerror(errno));
  close(file);
  device_ = static_cast<char*>(device);
  host_ = static_cast<char*>(host);
}

char* MappedMemory::host_address(const void* device_address) const {
  TORCH_CHECK(device_of(device_address) >= 0, "late device: ", device_address,
              " is not an address of a late device");
  return host_ + (static_cast<const char*>(device_address) - device_);
}

int MappedMemory::device_of(const void* device_address) const {
  const auto offset =
      reinterpret_cast<uintptr_t>(device_address) - reinterpret_cast<uintptr_t>(device_);
  return offset < kMappedBytes ? static_cast<int>(offset / kDeviceBytes) : -1;
}

DeviceAllocator::DeviceAllocator(const MappedMemory& memory, StreamTable& streams)
    : memory_(memory), streams_(streams) {}

c10::DataPtr DeviceAllocator::allocate(size_t num_bytes) {
  const int device = current_device();
  const c10::Device c10_device = late_device_of(device);
  if (num_bytes == 0) return {nullptr, nullptr, &free, c10_device};
  const std::lock_guard lock(mutex_);
  fail_if_told(device, num_bytes);
  collect_freed();
  const size_t asked_bytes = (num_bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
  Block block = take_block(asked_bytes, device, current_stream(device));
  block.asked_bytes = asked_bytes;
  blocks_.emplace(block.address, block);
  auto& counted = stats(device);
  counted.allocation[0].increase(1);
  counted.allocated_bytes[0].increase(asked_bytes);
  counted.active[0].increase(1);
  counted.active_bytes[0].increase(block.num_bytes);
  return {block.address, block.address, &free, c10_device};
}

void DeviceAllocator::fail_allocations(int device, std::function<bool(size_t num_bytes)> fails) {
  const std::lock_guard lock(mutex_);
  fails_.at(static_cast<size_t>(device)) = std::move(fails);
}

void DeviceAllocator::fail_if_told(int device, size_t num_bytes) {
  const auto& fails = fails_.at(static_cast<size_t>(device));
  if (!fails || !fails(num_bytes)) return;
  ++stats(device).num_ooms;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "late:", device, " is out of memory: a test lets this ",
                   "allocation of ", num_bytes, " bytes fail");
}

DeviceAllocator::Block DeviceAllocator::take_block(size_t num_bytes, int device, int stream) {
  auto& available = available_[{device, stream}];
  const auto found = available.lower_bound(num_bytes);
  if (found != available.end() && found->first <= 2 * num_bytes + kSlackBytes) {
    const Block block{
        .address = found->second, .num_bytes = found->first, .device = device, .stream = stream};
    available.erase(found);
    return block;
  }
  size_t& used = used_bytes_.at(static_cast<size_t>(device));
  if (num_bytes > MappedMemory::kDeviceBytes - used) {
    ++stats(device).num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "late:", device, " is out of memory: ", num_bytes,
                     " bytes were asked for, ", MappedMemory::kDeviceBytes - used, " of ",
                     MappedMemory::kDeviceBytes, " bytes are free");
  }
  char* const address = memory_.device_address(device, used);
  used += num_bytes;
  std::memset(memory_.host_address(address), 0xFF, num_bytes);
  stats(device).reserved_bytes[0].increase(num_bytes);
  return {.address = address, .num_bytes = num_bytes, .device = device, .stream = stream};
}

void DeviceAllocator::copy_data(void* /*to*/, const void* /*from*/, size_t /*num_bytes*/) const {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "late device: Allocator::copy_data: copy tensors instead");
}

void DeviceAllocator::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  if (data.get() == nullptr || data.get_deleter() != &free) return;
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(data.get_context());
  if (found == blocks_.end()) return;
  Block& block = found->second;
  if (stream.id() != block.stream) block.users.insert(static_cast<int>(stream.id()));
}

void DeviceAllocator::free(void* address) {
  if (address != nullptr) runtime().allocator.free_block(address);
}

void DeviceAllocator::free_block(void* address) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(address);
  if (found == blocks_.end()) return;
  FreedBlock freed{std::move(found->second), {}};
  blocks_.erase(found);
  stats(freed.block.device).allocation[0].decrease(1);
  stats(freed.block.device).allocated_bytes[0].decrease(freed.block.asked_bytes);
  for (const int user : freed.block.users) {
    freed.uses.push_back(streams_.get(freed.block.device, user).record());
  }
  if (freed.uses.empty()) {
    make_available(freed.block);
  } else {
    freed_.push_back(std::move(freed));
  }
}

void DeviceAllocator::make_available(const Block& block) {
  streams_.get(block.device, block.stream)
      .enqueue([host = memory_.host_address(block.address),
                num_bytes = block.num_bytes] { std::memset(host, 0xFF, num_bytes); },
               StreamQueue::TaskKind::kOther);
  available_[{block.device, block.stream}].emplace(block.num_bytes, block.address);
  stats(block.device).active[0].decrease(1);
  stats(block.device).active_bytes[0].decrease(block.num_bytes);
}

void DeviceAllocator::collect_freed() {
  std::erase_if(freed_, [&](const FreedBlock& freed) {
    for (const auto& use : freed.uses) {
      if (!use->is_set()) return false;
    }
    make_available(freed.block);
    return true;
  });
}

c10::CachingDeviceAllocator::DeviceStats DeviceAllocator::getDeviceStats(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  return stats(device);
}

void DeviceAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  auto& counted = stats(device);
  for (auto* array : {&counted.allocation, &counted.allocated_bytes, &counted.active,
                      &counted.active_bytes, &counted.reserved_bytes}) {
    (*array)[0].reset_accumulated();
  }
  counted.num_ooms = 0;
}

void DeviceAllocator::resetPeakStats(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  auto& counted = stats(device);
  for (auto* array : {&counted.allocation, &counted.allocated_bytes, &counted.active,
                      &counted.active_bytes, &counted.reserved_bytes}) {
    (*array)[0].reset_peak();
  }
}

std::pair<size_t, size_t> DeviceAllocator::getMemoryInfo(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  const size_t used = used_bytes_.at(static_cast<size_t>(device));
  return {MappedMemory::kDeviceBytes - used, MappedMemory::kDeviceBytes};
}

}  // namespace cadre::testing::late
