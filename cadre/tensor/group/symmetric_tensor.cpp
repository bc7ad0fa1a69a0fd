#include "cadre/tensor/group/symmetric_tensor.h"

#include "cadre/core/base/format.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/group/operands/operands.h"
#include "cadre/tensor/group/operands/tensor_checks.h"

namespace cadre {

SymmetricTensor SymmetricTensor::allocate(const ProcessGroup& group, int64_t numel,
                                          at::ScalarType type) {
  const std::optional<DType> dtype = to_dtype(type);
  if (!dtype || numel < 1 || numel > kMaxElements) {
    refuse_tensor(
        group.communicator(), "SymmetricTensor::allocate",
        format("{} elements of dtype {} cannot be shared; pass a count from 1 to {} and one "
               "of the dtypes {}",
               numel, dtype_name(type), kMaxElements, dtype_names()));
  }
  const size_t num_bytes = static_cast<size_t>(numel) * size_of(*dtype);
  auto buffer =
      group.communicator().allocate_symmetric(num_bytes, {.call = "SymmetricTensor::allocate"});
  at::Tensor local = tensor_on(buffer, buffer->local().first(num_bytes), type);
  return {group, std::move(buffer), std::move(local)};
}

SymmetricBuffer& SymmetricTensor::buffer(std::string_view call) const {
  if (buffer_ != nullptr) return *buffer_;
  throw Error(
      ErrorCode::kInvalidArgument,
      format("SymmetricTensor::{}: this tensor was moved from and has no memory; use the one "
             "that it was moved to, or copy it instead",
             call));
}

const at::Tensor& SymmetricTensor::local() const {
  buffer("local");
  return local_;
}

bool SymmetricTensor::shares_memory() const {
  return buffer("shares_memory").shares_memory();
}

at::Tensor SymmetricTensor::peer(int rank) const {
  const Bytes theirs = buffer("peer").writable_peer(rank);
  if (rank == group_.rank()) return local_;
  return tensor_on(buffer_, theirs.first(local_.nbytes()), local_.scalar_type());
}

void SymmetricTensor::signal(int rank, uint32_t slot) const {
  buffer("signal").signal(rank, slot);
}

void SymmetricTensor::wait_signal(int rank, uint32_t slot, const WaitSignalOptions& options) const {
  SymmetricBuffer& memory = buffer("wait_signal");
  const Communicator& communicator = group_.communicator();
  memory.wait_signal(rank, slot,
                     deadline_of(communicator, "wait_signal",
                                 options.timeout.value_or(communicator.options().timeout)));
}

}  // namespace cadre
