#include "cadre/parallel/buckets/handed_out_memory.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace cadre {

at::Tensor take_memory_back(const at::Tensor& flat) {
  const at::NoGradGuard no_grad;
  c10::StorageImpl& held = *flat.storage().unsafeGetStorageImpl();
  const size_t num_bytes = held.nbytes();
  const auto bytes = static_cast<int64_t>(num_bytes);
  const at::TensorOptions options = flat.options().dtype(at::kByte);
  const at::Tensor copy = at::empty({0}, options).set_(flat.storage(), 0, {bytes}, {1}).clone();
  at::DataPtr copied = copy.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr());
  at::DataPtr memory = held.set_data_ptr(std::move(copied));
  c10::Storage storage(c10::Storage::use_byte_size_t(), num_bytes, std::move(memory),
                       /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor taken = at::empty({0}, flat.options());
  taken.set_(std::move(storage), flat.storage_offset(), flat.sizes(), flat.strides());
  return taken;
}

at::Tensor lent(const at::Tensor& flat) {
  if (flat.is_cpu()) return flat;
  return at::from_blob(
      flat.mutable_data_ptr(), flat.sizes(), [kept = flat](void*) mutable { kept.reset(); },
      flat.options(), flat.device());
}

}  // namespace cadre
