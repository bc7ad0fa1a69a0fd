#include "cadre/group/symmetric_tensor.h"

#include "cadre/base/format.h"
#include "cadre/group/dtype.h"
#include "cadre/group/operands/operands.h"
#include "cadre/group/operands/tensor_checks.h"

namespace cadre {

SymmetricTensor SymmetricTensor::allocate(const ProcessGroup& group, int64_t numel,
                                          at::ScalarType type) {
  const std::optional<DType> dtype = to_dtype(type);
  if (!dtype || numel < 1 || numel > kMaxElements) {
    refuse_tensor(group.communicator(), "SymmetricTensor::allocate",
                  format("{} elements of {} cannot be shared; pass a count from 1 to {} and one of "
                         "{}",
                         numel, dtype_name(type), kMaxElements, dtype_names()));
  }
  const size_t num_bytes = static_cast<size_t>(numel) * size_of(*dtype);
  auto buffer =
      group.communicator().allocate_symmetric(num_bytes, {.call = "SymmetricTensor::allocate"});
  at::Tensor local = tensor_on(buffer, buffer->local().first(num_bytes), type);
  return {group, std::move(buffer), std::move(local)};
}

at::Tensor SymmetricTensor::peer(Rank rank) const {
  if (rank == group_.rank()) return local_;
  return tensor_on(buffer_, buffer_->writable_peer(rank).first(local_.nbytes()),
                   local_.scalar_type());
}

void SymmetricTensor::signal(Rank rank, uint32_t slot) const {
  buffer_->signal(rank, slot);
}

void SymmetricTensor::wait_signal(Rank rank, uint32_t slot, std::optional<Duration> timeout) const {
  const Communicator& communicator = group_.communicator();
  buffer_->wait_signal(
      rank, slot,
      deadline_of(communicator, "wait_signal", timeout.value_or(communicator.options().timeout)));
}

}  // namespace cadre
