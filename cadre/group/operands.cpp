#include "cadre/group/operands.h"

#include <ATen/ops/from_blob.h>

#include <utility>

namespace cadre {

void mark_changed(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

Bytes bytes_of(const at::Tensor& tensor) {
  mark_changed(tensor);
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

ConstBytes const_bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

Collective comparing(const at::Tensor& compared, Collective collective) {
  const at::IntArrayRef sizes = compared.sizes();
  collective.shape = std::span(sizes.data(), sizes.size());
  return collective;
}

std::optional<Deadline> deadline_of(const Communicator& communicator,
                                    std::optional<Duration> timeout) {
  if (!timeout) return std::nullopt;
  return communicator.system().deadline_in(*timeout);
}

at::Tensor tensor_on(const std::shared_ptr<SymmetricBuffer>& buffer, Bytes bytes,
                     at::ScalarType dtype) {
  const auto numel = static_cast<int64_t>(bytes.size() / c10::elementSize(dtype));
  return at::from_blob(
      bytes.data(), {numel}, [kept = buffer](void*) mutable { kept.reset(); },
      at::TensorOptions().dtype(dtype));
}

}  // namespace cadre
