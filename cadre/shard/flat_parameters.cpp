#include "cadre/shard/flat_parameters.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <numeric>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/shard/shardable.h"

namespace cadre {
namespace {

constexpr const char* kSharded = "are sharded: this rank has only a part of them";

[[noreturn]] void refuse(const std::string& what, const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, format("{}: {}", what, problem));
}

std::string default_name(const std::vector<NamedTensor>& parameters) {
  if (parameters.size() == 1) return format("\"{}\"", parameters[0].name);
  return format("\"{}\" and {} more", parameters[0].name, parameters.size() - 1);
}

std::vector<int64_t> numels_of(const std::vector<NamedTensor>& parameters) {
  std::vector<int64_t> numels;
  for (const NamedTensor& parameter : parameters) {
    numels.push_back(parameter.tensor.defined() ? parameter.tensor.numel() : 0);
  }
  return numels;
}

}  // namespace

FlatParameters::FlatParameters(std::vector<NamedTensor> parameters,
                               std::shared_ptr<ReplicaGroup> group, Options options)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      options_(std::move(options)),
      dtype_(at::kFloat),
      layout_(numels_of(parameters_), group_ ? group_->world_size() : 1, options_.alignment) {
  if (!group_) refuse("FlatParameters", "the group is null; make it first");
  if (parameters_.empty()) {
    refuse("FlatParameters", "there are no parameters; leave out a set without any");
  }
  if (options_.name.empty()) options_.name = default_name(parameters_);
  if (!options_.pool) options_.pool = std::make_shared<FlatBufferPool>();
  if (!options_.fence) options_.fence = std::make_shared<ShardFence>();
  if (parameters_[0].tensor.defined()) dtype_ = parameters_[0].tensor.scalar_type();
  check_parameters();
  const at::NoGradGuard no_grad;
  if (options_.form == ShardForm::kMapped) map_memory();
  make_memory();
  take_over_parameters();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const int rank = group_->rank().value;
    const int64_t size = layout_.range(i, rank).size();
    // With a version counter of its own, as a leaf has.
    values_.push_back(shard_.narrow(0, layout_.offset_in_shard(i, rank), size).variable_data());
    values_.back().requires_grad_(parameters_[i].tensor.requires_grad());
  }
  if (options_.keep_full) {
    state_ = State::kFull;
    filled_version_ = version_of_shard();
  } else {
    guard(kSharded);
  }
  if (is_mapped()) end_writes();
  options_.fence->add(*this);
}

FlatParameters::~FlatParameters() {
  options_.fence->remove(*this);
}

void FlatParameters::check_parameters() const {
  const std::string what = format("sharding {}, rank {}", options_.name, group_->rank());
  check_shardable(what, parameters_, {.shard = dtype_, .compute = compute_dtype()});
  if (options_.form == ShardForm::kMapped && options_.keep_full) {
    refuse(what, "keep_full is a buffer of each rank, and kMapped one for all; choose one of them");
  }
}

bool FlatParameters::shares_memory() const {
  if (is_mapped() || compute_dtype() != dtype_) return false;
  return options_.keep_full || group_->world_size() == 1;
}

at::Tensor FlatParameters::own_part_of_buffer() const {
  return buffer_.narrow(0, group_->rank().value * layout_.shard_numel(), layout_.shard_numel());
}

void FlatParameters::map_memory() {
  if (!options_.fence->prepare(group_)) return;
  const int64_t page_numel =
      MappedParts::kPageBytes / static_cast<int64_t>(c10::elementSize(compute_dtype()));
  FlatLayout layout(numels_of(parameters_), group_->world_size(),
                    std::lcm(options_.alignment, page_numel));
  if (layout.numel() == 0) return;
  parts_ = group_->map_parts(layout.shard_numel(), compute_dtype());
  if (parts_) layout_ = std::move(layout);
}

void FlatParameters::make_memory() {
  flat_ = GuardedStorage(layout_.numel(), compute_dtype());
  if (keeps_buffer()) {
    buffer_ = is_mapped() ? parts_->whole() : group_->empty_flat(layout_.numel(), compute_dtype());
    flat_.set_memory(buffer_);
  }
  const bool is_own_part = is_mapped() && compute_dtype() == dtype_;
  // With a version counter of its own, which a gather does not move.
  shard_ = is_own_part       ? parts_->own()
           : shares_memory() ? own_part_of_buffer().variable_data()
                             : group_->empty_flat(layout_.shard_numel(), dtype_);
  if (compute_dtype() != dtype_) {
    sent_ =
        is_mapped() ? parts_->own() : group_->empty_flat(layout_.shard_numel(), compute_dtype());
  }
}

void FlatParameters::take_over_parameters() {
  const int rank = group_->rank().value;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    const int64_t numel = layout_.numel(i);
    const at::Tensor values = parameter.detach().contiguous().view(-1);
    if (keeps_buffer() && !is_mapped()) buffer_.narrow(0, layout_.offset(i), numel).copy_(values);
    if (!shares_memory()) {
      const FlatRange range = layout_.range(i, rank);
      shard_.narrow(0, layout_.offset_in_shard(i, rank), range.size())
          .copy_(values.narrow(0, range.begin, range.size()));
    }
    parameter.set_data(flat_.tensor().narrow(0, layout_.offset(i), numel).view(parameter.sizes()));
  }
}

std::vector<ParameterShard> FlatParameters::parameter_shards(const DeviceMesh& mesh,
                                                             const std::string& flat_axis) const {
  std::vector<ParameterShard> shards;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    shards.push_back({.name = parameters_[i].name,
                      .sizes = parameters_[i].tensor.sizes().vec(),
                      .mesh = mesh,
                      .placements = {mesh.axes().size(), Replicate()},
                      .flat_axis = flat_axis,
                      .range = layout_.range(i, group_->rank().value),
                      .values = values_[i],
                      .parameter = parameters_[i].tensor});
  }
  return shards;
}

// The gather would fill memory that the parameter no longer has.
void FlatParameters::check_in_place() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    if (parameter.storage().unsafeGetStorageImpl() ==
            flat_.tensor().storage().unsafeGetStorageImpl() &&
        parameter.storage_offset() == layout_.offset(i) && parameter.numel() == layout_.numel(i)) {
      continue;
    }
    refuse(format("{}, rank {}", options_.name, group_->rank()),
           format("\"{}\" has been given other memory since it was sharded, by set_data(), by "
                  "to() of its module or by another wrapper or optimizer. Change it before it is "
                  "sharded, and shard it once",
                  parameters_[i].name));
  }
}

uint32_t FlatParameters::version_of_shard() const {
  if (is_mapped()) return static_cast<uint32_t>(options_.fence->num_updates());
  uint32_t version = shard_._version();
  for (const at::Tensor& values : values_) version += values._version();
  return version;
}

const at::Tensor& FlatParameters::gather_input() {
  if (!sent_.defined()) return shard_;
  const at::NoGradGuard no_grad;
  sent_.copy_(shard_);
  return sent_;
}

void FlatParameters::unshard_async() {
  if (state_ == State::kGathering || is_unsharded()) return;
  check_in_place();
  gathered_version_ = version_of_shard();
  if (is_mapped()) {
    wait_ = [this] { options_.fence->wait_for_owners(); };
  } else {
    start_gather();
  }
  state_ = State::kGathering;
  guard("are being gathered from the other ranks");
}

void FlatParameters::start_gather() {
  const at::Tensor& input = gather_input();
  if (!buffer_.defined()) buffer_ = options_.pool->take(layout_.numel(), compute_dtype());
  try {
    wait_ = group_->all_gather_async(buffer_, input);
  } catch (...) {
    drop_gather();
    throw;
  }
}

void FlatParameters::wait_unsharded() {
  if (is_unsharded()) return;
  if (state_ != State::kGathering) {
    refuse(format("{}, rank {}", options_.name, group_->rank()),
           "wait_unsharded() waits for a gather that nobody has started; call unshard_async() "
           "before, on all ranks");
  }
  try {
    std::exchange(wait_, nullptr)();
  } catch (const Error& error) {
    drop_gather();
    throw error.with_context(
        format("gathering the parameters {}, rank {}", options_.name, group_->rank()));
  } catch (...) {
    drop_gather();
    throw;
  }
  finish_gather();
}

void FlatParameters::drop_gather() {
  state_ = State::kSharded;
  guard("are not there, because gathering them from the other ranks failed");
  // The operation may still write to the buffer.
  if (!keeps_buffer()) options_.pool->forget(std::exchange(buffer_, at::Tensor()));
}

void FlatParameters::finish_gather() {
  flat_.clear_guard();
  if (!keeps_buffer()) flat_.set_memory(buffer_);
  state_ = State::kFull;
  is_stale_ = false;
  // So that autograd notices a backward through a forward before the change.
  if (filled_version_.value_or(gathered_version_) != gathered_version_) {
    for (const NamedTensor& parameter : parameters_) {
      parameter.tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
  filled_version_ = gathered_version_;
  unsharded_version_ = version_of_parameters();
}

uint32_t FlatParameters::version_of_parameters() const {
  uint32_t version = 0;
  for (const NamedTensor& parameter : parameters_) version += parameter.tensor._version();
  return version;
}

void FlatParameters::check_unwritten() const {
  if (!is_mapped() || version_of_parameters() == unsharded_version_) return;
  throw Error(ErrorCode::kCorruption,
              format("{}, rank {}: the program has written to parameters while they were mapped. "
                     "All ranks read and write the same memory, so the values are not those that "
                     "one rank would get. Write to the shards, FlatParameters::values(), inside a "
                     "ShardUpdate, or choose ShardForm::kGathered; go on from the last snapshot",
                     options_.name, group_->rank()));
}

void FlatParameters::guard_writes() {
  if (is_mapped()) guard_against_writes(shard_);
}

void FlatParameters::allow_writes() {
  if (is_mapped()) clear_write_guard(shard_);
}

void FlatParameters::end_writes() {
  if (!is_mapped()) return;
  if (sent_.defined()) sent_.copy_(shard_);
  guard_writes();
}

void FlatParameters::reshard() {
  if (options_.keep_full) {
    refuse(options_.name, "reshard() is not allowed, because these parameters always stay whole");
  }
  if (state_ == State::kGathering) wait_unsharded();
  if (state_ == State::kSharded) return;
  const bool was_unsharded = is_unsharded();
  state_ = State::kSharded;
  is_stale_ = false;
  if (!keeps_buffer()) {
    flat_.set_memory(at::Tensor());
    options_.pool->give_back(std::exchange(buffer_, at::Tensor()));
  }
  guard(kSharded);
  if (was_unsharded) check_unwritten();
}

void FlatParameters::mark_stale() {
  if (state_ == State::kGathering) wait_unsharded();
  if (state_ == State::kSharded) return;
  const bool was_unsharded = is_unsharded();
  is_stale_ = true;
  guard("have changed on their owners");
  if (was_unsharded) check_unwritten();
}

void FlatParameters::take_from_parameters() {
  if (!is_unsharded()) {
    refuse(format("{}, rank {}", options_.name, group_->rank()),
           "take_from_parameters() needs the whole parameters; call unshard_async() and "
           "wait_unsharded() before");
  }
  if (is_mapped()) {
    refuse(format("{}, rank {}", options_.name, group_->rank()),
           "take_from_parameters() is not for mapped parameters, which all ranks write at once; "
           "write to values() inside a ShardUpdate");
  }
  const at::NoGradGuard no_grad;
  if (shares_memory()) {
    // The memory is the same, but the values are others.
    shard_.unsafeGetTensorImpl()->bump_version();
  } else {
    shard_.copy_(own_part_of_buffer());
  }
  filled_version_ = version_of_shard();
}

void FlatParameters::guard(const std::string& reason) {
  flat_.guard(format("The values of parameters {} {}. To use them, {}.", options_.name, reason,
                     options_.remedy));
}

}  // namespace cadre
