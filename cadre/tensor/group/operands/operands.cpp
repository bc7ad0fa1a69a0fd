#include "cadre/tensor/group/operands/operands.h"

#include <ATen/ops/from_blob.h>

#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/checks.h"
#include "cadre/core/os/system.h"
#include "cadre/tensor/device/stream_point.h"
#include "cadre/tensor/group/operands/tensor_checks.h"
#include "cadre/tensor/group/operands/world_of_one.h"

namespace cadre {

Communicator& group_behind(const std::shared_ptr<Communicator>& handle, std::string_view call) {
  if (handle != nullptr) {
    WorldOfOneScope::check(*handle, call);
    return *handle;
  }
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: this ProcessGroup was moved from and has no group; use the one that it "
                     "was moved to, or copy it instead",
                     call));
}

GroupCall::GroupCall(const std::shared_ptr<Communicator>& handle, std::string_view call_name,
                     std::optional<Duration> timeout)
    : GroupCall(group_behind(handle, call_name), call_name, timeout) {}

GroupCall::GroupCall(Communicator& group_in, std::string_view call_name,
                     std::optional<Duration> timeout)
    : group(group_in),
      name(call_name),
      deadline(timeout ? std::optional(deadline_of(group, call_name, *timeout)) : std::nullopt) {}

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

void place(const GroupCall& call, Collective& collective,
           std::initializer_list<const at::Tensor*> tensors) {
  const at::Tensor* first = nullptr;
  for (const at::Tensor* tensor : tensors) {
    if (!tensor->defined()) continue;
    if (first == nullptr) first = tensor;
    check_one_device(call.group, call.name, *first, *tensor);
  }
  if (first == nullptr || first->is_cpu()) return;
  collective.device = *call.group.device();
  collective.after = std::make_shared<const device::StreamPoint>(
      device::StreamPoint::on_current_stream(first->device()));
}

Collective comparing(const at::Tensor& compared, Collective collective) {
  const at::IntArrayRef sizes = compared.sizes();
  collective.shape = std::span(sizes.data(), sizes.size());
  return collective;
}

at::Tensor tensor_on(const std::shared_ptr<SymmetricBuffer>& buffer, Bytes bytes,
                     at::ScalarType dtype) {
  const auto numel = static_cast<int64_t>(bytes.size() / c10::elementSize(dtype));
  return at::from_blob(
      bytes.data(), {numel}, [kept = buffer](void*) mutable { kept.reset(); },
      at::TensorOptions().dtype(dtype));
}

}  // namespace cadre
