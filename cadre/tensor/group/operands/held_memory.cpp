#include "cadre/tensor/group/operands/held_memory.h"

#include <c10/core/impl/COW.h>

#include <utility>

namespace cadre {
namespace {

using SharedMemory = std::shared_ptr<const c10::DataPtr>;

void release(void* context) {
  const std::unique_ptr<SharedMemory> owned(static_cast<SharedMemory*>(context));
}

}  // namespace

std::shared_ptr<const void> hold_memory(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  const c10::Storage& storage = tensor.storage();
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  c10::DataPtr& current = impl._mutable_data_ptr_no_checks();
  if (const auto* shared = current.cast_context<SharedMemory>(&release)) return *shared;
  if (!current.device().is_cpu() || !impl.resizable() ||
      !c10::impl::cow::has_simple_data_ptr(impl)) {
    return std::make_shared<const c10::Storage>(storage);
  }
  void* const data = current.mutable_get();
  const c10::Device device = current.device();
  auto context = std::make_unique<SharedMemory>(
      std::make_shared<const c10::DataPtr>(std::exchange(current, c10::DataPtr())));
  SharedMemory result = *context;
  current = c10::DataPtr(data, context.release(), &release, device);
  return result;
}

}  // namespace cadre
