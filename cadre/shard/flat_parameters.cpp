#include "cadre/shard/flat_parameters.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/group/dtype.h"
#include "cadre/wrap/shard_mark.h"

namespace cadre {
namespace {

constexpr const char* kSharded = "are sharded: this rank has only a part of them";

[[noreturn]] void refuse(const std::string& what, const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, format("{}: {}", what, problem));
}

const std::byte* begin_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

// The memory between the first and the last element, for a tensor with elements.
const std::byte* end_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return begin_of(tensor) + (last + 1) * static_cast<int64_t>(tensor.element_size());
}

void check_form(const std::string& what, const NamedTensor& parameter, at::ScalarType dtype) {
  const at::Tensor& tensor = parameter.tensor;
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.device().is_cpu()) {
    refuse(what,
           format("\"{}\" is {}; only dense CPU tensors with values can be sharded", parameter.name,
                  !tensor.defined() ? std::string("undefined")
                                    : "on " + tensor.device().str() + " or not dense"));
  }
  if (!tensor.is_leaf()) {
    refuse(what, format("\"{}\" is the result of an operation and no leaf; pass the parameters of "
                        "a module",
                        parameter.name));
  }
  if (tensor.scalar_type() != dtype) {
    refuse(what, format("\"{}\" is {} but the first parameter is {}; put parameters of different "
                        "dtypes into different sets",
                        parameter.name, c10::toString(tensor.scalar_type()), c10::toString(dtype)));
  }
}

// Throws for a parameter that is sharded already, which has no memory.
const std::byte* checked_begin_of(const std::string& what, const NamedTensor& parameter) {
  try {
    return begin_of(parameter.tensor);
  } catch (const c10::Error&) {
    refuse(what, format("the values of \"{}\" are not there; a wrapper or optimizer has sharded "
                        "them already. Destroy that one first, or use it",
                        parameter.name));
  }
}

void check_apart(const std::string& what, const std::vector<NamedTensor>& parameters) {
  std::vector<std::pair<const std::byte*, const NamedTensor*>> places;
  for (const NamedTensor& parameter : parameters) {
    if (parameter.tensor.numel() == 0) continue;
    places.emplace_back(checked_begin_of(what, parameter), &parameter);
  }
  std::stable_sort(places.begin(), places.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 1; i < places.size(); ++i) {
    if (end_of(places[i - 1].second->tensor) <= places[i].first) continue;
    refuse(what, format("\"{}\" and \"{}\" share memory, and only one place can hold it; give them "
                        "memory of their own, or make them one tensor under two names and pass it "
                        "once",
                        places[i - 1].second->name, places[i].second->name));
  }
}

void release_tensor(void* context) {
  const std::unique_ptr<at::Tensor> owned(static_cast<at::Tensor*>(context));
}

// Memory of a storage that keeps `buffer`.
at::DataPtr memory_of(const at::Tensor& buffer) {
  void* const data = buffer.mutable_data_ptr();
  auto context = std::make_unique<at::Tensor>(buffer);
  return {data, context.release(), &release_tensor, buffer.device()};
}

// (numel), with a storage that has no memory. It keeps its size all the time, because libtorch
// checks each view of a parameter against it.
at::Tensor without_memory(int64_t numel, at::ScalarType dtype) {
  const auto num_bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(num_bytes),
                       at::DataPtr(nullptr, at::kCPU), /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return tensor;
}

constexpr const char* kOwnStepOnly =
    "mapped shards are written by Cadre's own step only, when no rank reads them: use "
    "cadre::ShardedOptimizer or hold a cadre::ShardUpdate; or choose ShardForm::kGathered, whose "
    "shards any optimizer may write";

// What libtorch calls where memory is about to be written. Because it throws, it stays.
void refuse_write(c10::StorageImpl*) {
  throw Error(ErrorCode::kInvalidArgument, kOwnStepOnly);
}

// Reading is allowed, but before libtorch 2.13, which cannot tell it from writing.
template <typename Storage>
void guard_against_writes(Storage& storage) {
  if constexpr (requires { storage.has_materializer(); }) {
    if (!storage.has_materializer()) storage.set_materializer(&refuse_write);
  } else {
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(kOwnStepOnly));
  }
}

template <typename Storage>
void clear_write_guard(Storage& storage) {
  if constexpr (requires { storage.has_materializer(); }) {
    storage.clear_materializer();
  } else {
    storage.clear_data_ptr_access_error_msg_();
  }
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
    mark_as_shard(values_.back(),
                  {.parameter = parameters_[i].name, .owner = options_.name, .rank = rank});
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
  for (const NamedTensor& parameter : parameters_) check_form(what, parameter, dtype_);
  for (const at::ScalarType dtype : {dtype_, compute_dtype()}) {
    if (to_dtype(dtype)) continue;
    refuse(what,
           format("{} cannot be exchanged; supported are {}", c10::toString(dtype), dtype_names()));
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const NamedTensor& parameter = parameters_[i];
    if (compute_dtype() != dtype_ && parameter.tensor.grad().defined()) {
      refuse(what, format("\"{}\" has a gradient in {}, and its values become {}; call "
                          "zero_grad() before",
                          parameter.name, c10::toString(dtype_), c10::toString(compute_dtype())));
    }
    for (size_t k = 0; k < i; ++k) {
      if (!parameters_[k].tensor.is_same(parameter.tensor)) continue;
      refuse(what, format("\"{}\" and \"{}\" are one tensor; pass it once", parameters_[k].name,
                          parameter.name));
    }
  }
  check_apart(what, parameters_);
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
  flat_ = without_memory(layout_.numel(), compute_dtype());
  if (keeps_buffer()) {
    buffer_ = is_mapped() ? parts_->whole() : group_->empty_flat(layout_.numel(), compute_dtype());
    set_memory(buffer_);
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
    parameter.set_data(flat_.narrow(0, layout_.offset(i), numel).view(parameter.sizes()));
  }
}

std::vector<ParameterShard> FlatParameters::parameter_shards(const DeviceMesh& mesh,
                                                             const std::string& flat_axis) const {
  // Null where this is no shared object.
  const auto self = std::const_pointer_cast<FlatParameters>(weak_from_this().lock());
  std::vector<ParameterShard> shards;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    shards.push_back({.name = parameters_[i].name,
                      .sizes = parameters_[i].tensor.sizes().vec(),
                      .mesh = mesh,
                      .placements = {mesh.axes().size(), Replicate()},
                      .flat_axis = flat_axis,
                      .range = layout_.range(i, group_->rank().value),
                      .values = values_[i],
                      .parameter = parameters_[i].tensor,
                      .flat = self});
  }
  return shards;
}

// The gather would fill memory that the parameter no longer has.
void FlatParameters::check_in_place() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    if (parameter.storage().unsafeGetStorageImpl() == flat_.storage().unsafeGetStorageImpl() &&
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
  clear_guard();
  if (!keeps_buffer()) set_memory(buffer_);
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
  if (is_mapped()) guard_against_writes(*shard_.storage().unsafeGetStorageImpl());
}

void FlatParameters::allow_writes() {
  if (is_mapped()) clear_write_guard(*shard_.storage().unsafeGetStorageImpl());
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
    set_memory(at::Tensor());
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

// The writer may have gone around autograd's version counters.
void gather_changed(std::span<const std::shared_ptr<FlatParameters>> changed) {
  for (const auto& flat : changed) {
    if (!flat->is_mapped()) flat->shard_.unsafeGetTensorImpl()->bump_version();
    flat->mark_stale();
    if (flat->options_.keep_full) flat->unshard_async();
  }
  for (const auto& flat : changed) {
    if (flat->options_.keep_full) flat->wait_unsharded();
  }
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

void FlatParameters::set_memory(const at::Tensor& buffer) {
  flat_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      buffer.defined() ? memory_of(buffer) : at::DataPtr(nullptr, at::kCPU));
}

void FlatParameters::guard(const std::string& reason) {
  if (layout_.numel() == 0) return;
  flat_.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      format("The values of parameters {} {}. To use them, {}.", options_.name, reason,
             options_.remedy));
}

void FlatParameters::clear_guard() {
  flat_.storage().unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
}

}  // namespace cadre
