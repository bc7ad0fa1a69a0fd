#include "cadre/tensor/group/symmetric_tensor.h"

#include <cstddef>
#include <span>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/checks.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/group/operands/operands.h"
#include "cadre/tensor/group/operands/tensor_checks.h"

namespace cadre {

namespace {

constexpr const char* kAllocate = "SymmetricTensor::allocate";

// Maps the memory of all ranks to consecutive addresses. Returns an empty span if this rank cannot
// do that.
Bytes try_map(SymmetricBuffer& buffer, int world_size) {
  if (world_size == 1) return buffer.local();
  if (!buffer.shares_memory()) return {};
  try {
    const ConstBytes all = buffer.view();
    // The view is const, because it includes the memory of other ranks; this rank may write to its
    // own part of it.
    return {const_cast<std::byte*>(all.data()), all.size()};
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnavailable) throw;
    return {};  // the process has no address space or no mappings left
  }
}

// Returns whether `own` is true on every rank. Collective.
bool all_agree(const ProcessGroup& group, bool own) {
  int32_t flag = own ? 1 : 0;
  const Bytes bytes = std::as_writable_bytes(std::span(&flag, 1));
  group.communicator().all_reduce(bytes, bytes, DType::kInt32, ReduceOp::kMin, {.call = kAllocate});
  return flag != 0;
}

}  // namespace

SymmetricTensor SymmetricTensor::allocate(const ProcessGroup& group, int64_t numel,
                                          at::ScalarType type,
                                          const SymmetricTensorOptions& options) {
  const std::optional<DType> dtype = to_dtype(type);
  if (!dtype || numel < 1 || numel > kMaxElements) {
    refuse_tensor(
        group.communicator(), kAllocate,
        format("{} elements of dtype {} cannot be shared; pass a count from 1 to {} and one "
               "of the dtypes {}",
               numel, dtype_name(type), kMaxElements, dtype_names()));
  }
  const size_t num_bytes = static_cast<size_t>(numel) * size_of(*dtype);
  if (options.with_whole && num_bytes % kPageBytes != 0) {
    refuse_tensor(group.communicator(), kAllocate,
                  format("{} elements of {} are {} bytes, and with_whole takes tensors that fill "
                         "whole pages of {} bytes",
                         numel, dtype_name(type), num_bytes, kPageBytes));
  }
  auto buffer = group.communicator().allocate_symmetric(num_bytes, {.call = kAllocate});
  at::Tensor local = tensor_on(buffer, buffer->local().first(num_bytes), type);
  SymmetricTensor tensor(group, std::move(buffer), std::move(local));
  if (options.with_whole) {
    const Bytes whole = try_map(*tensor.buffer_, group.world_size());
    const bool is_mapped = whole.size() == num_bytes * static_cast<size_t>(group.world_size());
    // If one rank cannot map the tensors, no rank uses the mapping.
    if (all_agree(group, is_mapped)) tensor.whole_ = tensor_on(tensor.buffer_, whole, type);
  }
  return tensor;
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

bool SymmetricTensor::has_whole() const {
  buffer("has_whole");
  return whole_.defined();
}

const at::Tensor& SymmetricTensor::whole() const {
  buffer("whole");
  if (const auto failure = group_.error()) throw *failure;
  if (whole_.defined()) return whole_;
  refuse_tensor(group_.communicator(), "SymmetricTensor::whole",
                "the tensors of the ranks are not mapped side by side; allocate the tensor with "
                "{.with_whole = true}, and call whole() where has_whole() is true");
}

void SymmetricTensor::signal(int rank, uint32_t slot) const {
  buffer("signal").signal(rank, slot);
}

Deadline SymmetricTensor::deadline_of_wait(std::string_view call,
                                           const WaitSignalOptions& options) const {
  const Communicator& communicator = group_.communicator();
  return deadline_of(communicator, call, options.timeout.value_or(communicator.options().timeout));
}

void SymmetricTensor::wait_signal(int rank, uint32_t slot, const WaitSignalOptions& options) const {
  SymmetricBuffer& memory = buffer("wait_signal");
  memory.wait_signal(rank, slot, deadline_of_wait("wait_signal", options));
}

void SymmetricTensor::signal_peers(uint32_t slot) const {
  SymmetricBuffer& memory = buffer("signal_peers");
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    if (rank != group_.rank()) memory.signal(rank, slot);
  }
}

void SymmetricTensor::wait_for_peers(uint32_t slot, const WaitSignalOptions& options) const {
  SymmetricBuffer& memory = buffer("wait_for_peers");
  const Deadline until = deadline_of_wait("wait_for_peers", options);
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    if (rank != group_.rank()) memory.wait_signal(rank, slot, until);
  }
}

}  // namespace cadre
