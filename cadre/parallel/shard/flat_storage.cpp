#include "cadre/parallel/shard/flat_storage.h"

#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/tensor/device/stream_point.h"

namespace cadre::shard {

namespace {

void release_tensor(void* context) {
  const std::unique_ptr<at::Tensor> owned(static_cast<at::Tensor*>(context));
}

// Returns a DataPtr to the memory of `buffer`. It keeps `buffer` alive until it is destroyed.
at::DataPtr memory_of(const at::Tensor& buffer) {
  void* const data = buffer.mutable_data_ptr();
  auto context = std::make_unique<at::Tensor>(buffer);
  return {data, context.release(), &release_tensor, buffer.device()};
}

constexpr const char* kOwnStepOnly =
    "mapped shards are written by Cadre's own step only, at a time when no rank reads them: make "
    "the optimizer as cadre::ShardedOptimizer<cadre::AdamW>{model, options}, or hold a "
    "cadre::ShardUpdate while you write; or choose ShardForm::kGathered, whose shards any "
    "optimizer may write";

// libtorch calls a storage's materializer before the first write to the memory. Because this one
// throws, libtorch does not consider the storage materialized, and calls it before every write.
void refuse_write(c10::StorageImpl*) {
  throw Error(ErrorCode::kInvalidArgument, kOwnStepOnly);
}

template <typename Storage>
void guard_writes_of(Storage& storage) {
  if constexpr (requires { storage.has_materializer(); }) {
    if (!storage.has_materializer()) storage.set_materializer(&refuse_write);
  } else {
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(kOwnStepOnly));
  }
}

template <typename Storage>
void allow_writes_of(Storage& storage) {
  if constexpr (requires { storage.has_materializer(); }) {
    storage.clear_materializer();
  } else {
    storage.clear_data_ptr_access_error_msg_();
  }
}

}  // namespace

GuardedStorage::GuardedStorage(int64_t numel, at::ScalarType dtype, c10::Device device) {
  const auto num_bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(num_bytes),
                       at::DataPtr(nullptr, device), /*allocator=*/nullptr, /*resizable=*/false);
  tensor_ = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, /*layout=*/std::nullopt, device)),
      c10::scalarTypeToTypeMeta(dtype));
  tensor_.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
}

void GuardedStorage::set_memory(const at::Tensor& buffer) {
  tensor_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      buffer.defined() ? memory_of(buffer) : at::DataPtr(nullptr, tensor_.device()));
}

void GuardedStorage::guard(const std::string& sentence) {
  if (tensor_.numel() == 0) return;
  tensor_.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      sentence);
}

void GuardedStorage::clear_guard() {
  tensor_.storage().unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
}

void guard_against_writes(const at::Tensor& shard) {
  guard_writes_of(*shard.storage().unsafeGetStorageImpl());
}

void clear_write_guard(const at::Tensor& shard) {
  allow_writes_of(*shard.storage().unsafeGetStorageImpl());
}

at::Tensor FlatBufferPool::take(int64_t numel, at::ScalarType dtype, c10::Device device) {
  const auto num_bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  used_bytes_ += num_bytes;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  const auto same = std::find_if(kept_.rbegin(), kept_.rend(), [&](const Kept& kept) {
    return kept.bytes.numel() == num_bytes && kept.bytes.device() == device;
  });
  if (same != kept_.rend()) {
    const Kept found = *same;
    kept_.erase(std::next(same).base());
    kept_bytes_ -= num_bytes;
    if (found.last_use) found.last_use->order_current_stream().value_or_throw();
    return found.bytes.view(dtype);
  }
  while (!kept_.empty() && used_bytes_ + kept_bytes_ > peak_bytes_) {
    const Kept& oldest = kept_.front();
    if (oldest.last_use) {
      oldest.last_use->order_current_stream().value_or_throw();
      device::hold_for_current_stream(oldest.bytes);
    }
    kept_bytes_ -= oldest.bytes.numel();
    kept_.erase(kept_.begin());
  }
  return at::empty({num_bytes}, at::TensorOptions().dtype(at::kByte).device(device)).view(dtype);
}

void FlatBufferPool::give_back(const at::Tensor& buffer) {
  forget(buffer);
  Kept& kept = kept_.emplace_back(Kept{.bytes = buffer.view(at::kByte), .last_use = nullptr});
  if (!buffer.is_cpu()) {
    kept.last_use = std::make_shared<const device::StreamPoint>(
        device::StreamPoint::on_current_stream(buffer.device()));
  }
  kept_bytes_ += kept.bytes.numel();
}

void FlatBufferPool::forget(const at::Tensor& buffer) {
  used_bytes_ -= static_cast<int64_t>(buffer.nbytes());
}

}  // namespace cadre::shard
