#include "cadre/tensor/group/mapped_parts.h"

#include <cstdint>
#include <span>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/group/operands/operands.h"
#include "cadre/tensor/group/operands/tensor_checks.h"

namespace cadre {
namespace {

// Returns the parts of all ranks, or an empty span if this rank cannot map them.
Bytes try_map(SymmetricBuffer& buffer, int world_size) {
  if (world_size == 1) return buffer.local();
  if (!buffer.shares_memory()) return {};
  try {
    const ConstBytes all = buffer.view();
    // The owner of a part writes to it through the view, too.
    return {const_cast<std::byte*>(all.data()), all.size()};
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnavailable) throw;
    return {};  // there are not enough addresses or mappings
  }
}

}  // namespace

std::optional<MappedParts> MappedParts::allocate(const ProcessGroup& group, int64_t numel,
                                                 at::ScalarType type) {
  const std::optional<DType> dtype = to_dtype(type);
  const int64_t part_bytes = numel < 1 || numel > kMaxElements || !dtype
                                 ? 0
                                 : numel * static_cast<int64_t>(size_of(*dtype));
  if (part_bytes == 0 || part_bytes % kPageBytes != 0) {
    refuse_tensor(group.communicator(), "map_parts",
                  format("{} elements of {} cannot be a part; pass one of {}, and a count above 0 "
                         "that fills whole pages of {} bytes",
                         numel, dtype_name(type), dtype_names(), kPageBytes));
  }
  MappedParts parts(group, group.communicator().allocate_symmetric(static_cast<size_t>(part_bytes),
                                                                   {.call = "map_parts"}));
  const Bytes whole = try_map(*parts.buffer_, group.world_size());
  const bool is_mapped = whole.size() == static_cast<size_t>(part_bytes * group.world_size());
  // If one rank cannot map the parts, no rank uses them.
  int32_t all_mapped = is_mapped ? 1 : 0;
  const Bytes flag = std::as_writable_bytes(std::span(&all_mapped, 1));
  group.communicator().all_reduce(flag, flag, DType::kInt32, ReduceOp::kMin, {.call = "map_parts"});
  if (all_mapped == 0) return std::nullopt;
  parts.whole_ = tensor_on(parts.buffer_, whole, type);
  parts.own_ = tensor_on(parts.buffer_, parts.buffer_->local(), type);
  return parts;
}

const MappedParts& MappedParts::checked(std::string_view call) const {
  if (buffer_ != nullptr) return *this;
  throw Error(
      ErrorCode::kInvalidArgument,
      format("{}: these MappedParts were moved from and have no memory; use those that they "
             "were moved to",
             call));
}

const at::Tensor& MappedParts::whole() const {
  if (const auto failure = checked("MappedParts::whole").group_.error()) throw *failure;
  return whole_;
}

const at::Tensor& MappedParts::whole_after_failure() const {
  return checked("MappedParts::whole_after_failure").whole_;
}

const at::Tensor& MappedParts::own() const {
  return checked("MappedParts::own").own_;
}

Deadline MappedParts::deadline() const {
  const Communicator& communicator = group_.communicator();
  return communicator.system().deadline_in(communicator.options().timeout);
}

void MappedParts::signal_peers(uint32_t slot) const {
  checked("MappedParts::signal_peers");
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    if (rank != group_.rank()) buffer_->signal(rank, slot);
  }
}

void MappedParts::wait_for_peers(uint32_t slot) const {
  checked("MappedParts::wait_for_peers");
  const Deadline until = deadline();
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    if (rank != group_.rank()) buffer_->wait_signal(rank, slot, until);
  }
}

// Waits for a signal that this rank sends to itself: returns at once, or throws if the group has
// failed.
void MappedParts::check_group(uint32_t slot) const {
  checked("MappedParts::check_group");
  buffer_->signal(group_.rank(), slot);
  buffer_->wait_signal(group_.rank(), slot, deadline());
}

std::vector<int> MappedParts::lost_ranks() const {
  const auto lost = checked("MappedParts::lost_ranks").group_.communicator().lost_ranks();
  return {lost.begin(), lost.end()};
}

}  // namespace cadre
