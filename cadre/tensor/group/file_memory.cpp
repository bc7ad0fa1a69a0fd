#include "cadre/tensor/group/file_memory.h"

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/os/files/scratch_memory.h"

namespace cadre {

struct FileMemory::Block {
  std::shared_ptr<FileMemory> owner;  // the FileMemory, kept alive by each of its tensors
  os::ScratchMemory memory;
};

std::shared_ptr<FileMemory> FileMemory::open(const std::string& folder) {
  return std::make_shared<FileMemory>(Key(), os::ScratchArena::create(folder).value_or_throw());
}

int64_t FileMemory::in_pages(int64_t num_bytes) {
  return static_cast<int64_t>(os::ScratchArena::in_pages(static_cast<size_t>(num_bytes)));
}

void FileMemory::reserve(int64_t num_bytes) {
  arena_->reserve(static_cast<size_t>(num_bytes)).value_or_throw();
}

void FileMemory::release(void* block) {
  const std::unique_ptr<Block> owned(static_cast<Block*>(block));
  owned->owner->used_bytes_ -= static_cast<int64_t>(owned->memory.bytes().size());
}

at::Tensor FileMemory::zeros(int64_t numel, at::ScalarType dtype) {
  const size_t num_bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  at::DataPtr data(nullptr, at::kCPU);
  if (num_bytes > 0) {
    auto block = std::make_unique<Block>(
        Block{.owner = shared_from_this(), .memory = arena_->allocate(num_bytes).value_or_throw()});
    const Bytes bytes = block->memory.bytes();
    used_bytes_ += static_cast<int64_t>(bytes.size());
    data = {bytes.data(), block.release(), &release, at::kCPU};
  }
  c10::Storage storage(c10::Storage::use_byte_size_t(), num_bytes, std::move(data),
                       /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return tensor;
}

std::shared_ptr<FileMemory> FileMemory::of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  // The checked accessors would throw for a tensor whose memory is guarded against access.
  const c10::DataPtr& data = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  const auto* const block = data.cast_context<Block>(&release);
  return block == nullptr ? nullptr : block->owner;
}

}  // namespace cadre
