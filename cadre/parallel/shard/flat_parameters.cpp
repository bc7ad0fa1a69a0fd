#include "cadre/parallel/shard/flat_parameters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/where.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/division/parameter_division.h"
#include "cadre/parallel/shard/shardable.h"
#include "cadre/tensor/device/stream_point.h"
#include "cadre/tensor/group/file_memory.h"
#include "cadre/tensor/hooks/parameter_watch.h"
#include "cadre/tensor/hooks/shard_mark.h"

namespace cadre::shard {
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

// Returns the dtype of the first parameter. If there is none, returns kFloat; check_parameters()
// then throws.
at::ScalarType dtype_of(const std::vector<NamedTensor>& parameters) {
  const bool has_first = !parameters.empty() && parameters[0].tensor.defined();
  return has_first ? parameters[0].tensor.scalar_type() : at::kFloat;
}

}  // namespace

FlatParameters::FlatParameters(std::vector<NamedTensor> parameters, wrap::LocatedGroup group,
                               Options options)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      options_(std::move(options)),
      memory_(numels_of(parameters_), group_.world_size(),
              {.form = options_.form,
               .dtype = dtype_of(parameters_),
               .compute_dtype = options_.compute_dtype,
               .alignment = options_.alignment,
               .keep_full = options_.keep_full,
               .is_in_files = options_.files != nullptr}) {
  if (parameters_.empty()) {
    refuse("FlatParameters",
           "the list of parameters is empty; make FlatParameters only for a list with parameters");
  }
  if (options_.name.empty()) options_.name = default_name(parameters_);
  if (!options_.pool) options_.pool = std::make_shared<FlatBufferPool>();
  if (!options_.fence) options_.fence = std::make_shared<ShardFence>();
  check_parameters();
  const at::NoGradGuard no_grad;
  if (options_.form == ShardForm::kMapped && device().is_cpu()) map_memory();
  make_memory();
  take_over_parameters();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const int rank = group_.rank();
    const int64_t size = layout().range(i, rank).size();
    // variable_data() gives each slice its own version counter, as a leaf has.
    values_.push_back(shard_.narrow(0, layout().offset_in_shard(i, rank), size).variable_data());
    values_.back().requires_grad_(parameters_[i].tensor.requires_grad());
    wrap::mark_as_shard(values_.back(), {.parameter = parameters_[i].name,
                                         .owner = options_.name,
                                         .rank = rank,
                                         .num_ranks = group_.world_size(),
                                         .part = wrap::part_of(parameters_[i].tensor,
                                                               layout().range(i, rank).begin),
                                         .fence = options_.fence.get()});
    is_trained_.push_back(values_.back().requires_grad());
  }
  shard_watch_ = std::make_unique<wrap::WriteWatch>(named_values());
  if (options_.keep_full) {
    state_ = State::kFull;
    filled_ = shown_ = state_of_shard();
  } else {
    guard(kSharded);
  }
  if (is_mapped()) end_writes();
  written_ = std::make_unique<wrap::WriteWatch>(parameters_);
  options_.fence->add(*this);
}

FlatParameters::~FlatParameters() {
  if (options_.keep_full && state_ == State::kGathering) {
    try {
      wait_unsharded();
    } catch (...) {
      // The group has failed. Any access to a parameter then throws an error that says so.
    }
  }
  options_.fence->remove(*this);
}

void FlatParameters::check_parameters() const {
  const std::string what = format("sharding {}, {}", options_.name, group_.rank_text());
  check_shardable(what, parameters_, {.shard = dtype(), .compute = compute_dtype()});
  if (options_.form == ShardForm::kMapped && options_.keep_full) {
    refuse(what,
           "keep_full needs a buffer on each rank, but kMapped maps one buffer for all ranks; "
           "choose one of them");
  }
  for (const NamedTensor& parameter : parameters_) {
    if (parameter.tensor.device() == device()) continue;
    refuse(what, format("\"{}\" is on {} and \"{}\" on {}; move the module to one device with "
                        "module->to(device)",
                        parameters_[0].name, device().str(), parameter.name,
                        parameter.tensor.device().str()));
  }
  if (options_.files && !device().is_cpu()) {
    refuse(what, "shards in files are read and written by the CPU, and the parameters are on " +
                     device().str() + "; leave out the files, or move the module to the CPU");
  }
  if (options_.files && (options_.form == ShardForm::kMapped || options_.keep_full)) {
    refuse(what,
           "shards in files need a buffer that is freed after each gather; choose "
           "ShardForm::kGathered without keep_full, or leave out the files");
  }
  const int group_size = options_.reshard_group ? options_.reshard_group->world_size() : 1;
  if (group_.world_size() % group_size != 0) {
    refuse(what, format("the group to reshard onto has {} ranks, which does not divide the {} "
                        "ranks that own shards",
                        group_size, group_.world_size()));
  }
}

at::Tensor FlatParameters::own_part_of(const at::Tensor& whole) const {
  return whole.narrow(0, group_.rank() * layout().shard_numel(), layout().shard_numel());
}

void FlatParameters::map_memory() {
  if (!options_.fence->prepare(group_) || layout().numel() == 0) return;
  const FlatBuffer part = memory_.mapped_part();
  parts_ = group_.map_parts(part.numel, part.dtype);
  if (parts_) memory_.set_mapped();
}

void FlatParameters::make_memory() {
  const auto make = [this](const std::optional<FlatBuffer>& buffer) {
    return buffer ? group_.empty_flat(buffer->numel, buffer->dtype, device()) : at::Tensor();
  };
  const FlatMemory::Buffers buffers = memory_.buffers();
  flat_ = GuardedStorage(layout().numel(), compute_dtype(), device());
  buffer_ = is_mapped() ? parts_->whole() : make(buffers.whole);
  if (keeps_buffer()) flat_.set_memory(buffer_);
  if (shares_memory()) {
    // variable_data() gives the shard its own version counter, so that a gather into buffer_ does
    // not count as a write to the shard.
    shard_ = own_part_of(buffer_).variable_data();
  } else if (options_.files) {
    shard_ = options_.files->zeros(buffers.shard->numel, buffers.shard->dtype);
  } else {
    shard_ = buffers.shard ? make(buffers.shard) : parts_->local();
  }
  sent_ = make(buffers.sent);
  if (is_mapped() && buffers.shard) sent_ = parts_->local();
}

void FlatParameters::take_over_parameters() {
  const int rank = group_.rank();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    const wrap::ShardMark* const mark = wrap::shard_mark_of(parameter);
    const std::optional<wrap::ShardMark> kept = mark ? std::optional(*mark) : std::nullopt;
    divisions_.push_back(division_of(parameters_[i]));
    const int64_t numel = layout().numel(i);
    const at::Tensor values = parameter.detach().contiguous().view(-1);
    if (keeps_buffer() && !is_mapped()) buffer_.narrow(0, layout().offset(i), numel).copy_(values);
    if (!shares_memory()) {
      const FlatRange range = layout().range(i, rank);
      shard_.narrow(0, layout().offset_in_shard(i, rank), range.size())
          .copy_(values.narrow(0, range.begin, range.size()));
    }
    parameter.set_data(flat_.tensor().narrow(0, layout().offset(i), numel).view(parameter.sizes()));
    if (kept) wrap::mark_as_shard(parameter, *kept);
  }
}

// If a parameter or a shard was given other memory, a gather would write to memory that the
// parameter no longer uses, or an optimizer would write to memory that no gather reads.
void FlatParameters::check_in_place() const {
  check_shards_in_place();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    if (parameter.storage().unsafeGetStorageImpl() ==
            flat_.tensor().storage().unsafeGetStorageImpl() &&
        parameter.storage_offset() == layout().offset(i) &&
        parameter.numel() == layout().numel(i)) {
      continue;
    }
    refuse_use(
        format("\"{}\" has been given other memory since it was sharded, by set_data(), by to() of "
               "its module or by another wrapper or optimizer. Change the parameter before it is "
               "sharded, and shard it only once",
               parameters_[i].name));
  }
}

void FlatParameters::check_shards_in_place() const {
  const int rank = group_.rank();
  for (size_t i = 0; i < values_.size(); ++i) {
    const at::Tensor& values = values_[i];
    if (values.requires_grad() != is_trained_[i]) {
      refuse_use(
          format("requires_grad of this rank's shard of \"{}\" was changed, which changes nothing: "
                 "freeze and unfreeze the parameter of the module instead, on all ranks",
                 parameters_[i].name));
    }
    if (values.storage().unsafeGetStorageImpl() == shard_.storage().unsafeGetStorageImpl() &&
        values.storage_offset() == shard_.storage_offset() + layout().offset_in_shard(i, rank) &&
        values.numel() == layout().range(i, rank).size() && values.scalar_type() == dtype()) {
      continue;
    }
    refuse_use(format(
        "this rank's shard of \"{}\" has been given other memory, by set_data() for example, which "
        "no gather reads: forward() would continue to use the old values. Copy values into the "
        "shard instead, on all ranks: shard.values.copy_(values), under torch::NoGradGuard and, "
        "where shards are mapped, inside of a cadre::ShardUpdate",
        parameters_[i].name));
  }
}

std::vector<NamedTensor> FlatParameters::named_values() const {
  std::vector<NamedTensor> named;
  for (size_t i = 0; i < values_.size(); ++i) named.push_back({parameters_[i].name, values_[i]});
  return named;
}

uint32_t FlatParameters::version_of_shard() const {
  if (is_mapped()) return static_cast<uint32_t>(options_.fence->num_updates());
  return shard_._version() + shard_watch_->num_writes();
}

// Leaves `samples` 0 where the hash is not needed: mapped shards are written only in updates, and
// if the shard is the parameters' own memory, the program may write there at any time.
FlatParameters::ShardState FlatParameters::state_of_shard() const {
  const bool has_samples = !is_mapped() && (options_.keep_full || !shares_memory());
  return {.version = version_of_shard(), .samples = has_samples ? shard_watch_->samples() : 0};
}

bool FlatParameters::is_outdated() const {
  if (state_ == State::kSharded) return false;
  const ShardState& known = state_ == State::kGathering ? gathered_ : *filled_;
  // If the parameters are the shard's memory, the program may write to them, so only the version is
  // compared and not the sampled elements.
  if (shares_memory()) return known.version != version_of_shard();
  return known != state_of_shard();
}

// Checks nothing if the parameters stay whole or are the shard's own memory, because a write of the
// program is not lost then.
void FlatParameters::check_unwritten() {
  if (options_.keep_full || shares_memory()) return;
  const std::vector<size_t> written = written_->written();
  if (written.empty()) return;
  written_->begin();  // so that each write is reported once
  const std::string& name = parameters_[written[0]].name;
  const std::string where =
      format("{}, {}: the program has written to ", options_.name, group_.rank_text());
  const Error error(
      is_mapped() ? ErrorCode::kCorruption : ErrorCode::kInvalidArgument,
      where +
          (is_mapped()
               ? "parameters while they were mapped. All ranks read and write the same "
                 "memory, so the values are wrong on all of them. Write to the "
                 "shards inside a cadre::ShardUpdate, hold summon_full_params() and write "
                 "back, or choose ShardForm::kGathered; continue from the last snapshot"
               : format("\"{}\" while the parameters were gathered, as an Embedding with max_norm "
                        "does, or a weight that is normalized in place. The change is lost, "
                        "because it is not in the shards of the ranks that own the parameter. Let "
                        "forward() compute a new tensor from the weight, or change weights between "
                        "two steps: in the shards, or in summon_full_params() with write_back()",
                        name)));
  if (!options_.on_written) throw error;
  options_.on_written(name, error);
}

at::Tensor FlatParameters::gather_input() {
  if (compute_dtype() == dtype()) return shard_;
  const at::NoGradGuard no_grad;
  // sent_ is undefined for a shard in a file, because it would need the memory that the file saves.
  // The shard is then converted in this rank's part of the buffer.
  return (sent_.defined() ? sent_ : own_part_of(buffer_)).copy_(shard_);
}

void FlatParameters::refuse_use(const std::string& problem) const {
  refuse(format("{}, {}", options_.name, group_.rank_text()), problem);
}

void FlatParameters::unshard_async() {
  if (state_ == State::kGathering) {
    if (!is_outdated()) return;
    mark_stale();  // the gather in flight delivers old values
  }
  check_shards_in_place();
  // Whether the program has written to the shards between two steps. Only the version is compared:
  // a changed hash may come from a write to parameters that share the shard's memory, and only some
  // ranks may notice it.
  const bool is_written = is_unsharded() && filled_->version != version_of_shard();
  if (is_written && options_.keep_full) mark_stale();
  if (is_unsharded()) {
    // The parameters are the shard's memory, so they need no gather, only new version counters.
    if (shares_memory() && is_written) {
      filled_ = state_of_shard();
      show_state(*filled_);
    }
    return;
  }
  if (options_.fence->is_in_update()) {
    refuse_use(
        "the parameters are used during an update of the shards; end the update first, by "
        "ShardUpdate::finish() for example");
  }
  check_in_place();
  gathered_ = state_ == State::kOnGroup ? *filled_ : state_of_shard();
  if (is_mapped()) {
    wait_ = [this] { options_.fence->wait_for_owners(); };
  } else {
    start_gather();
  }
  state_ = State::kGathering;
  guard("are being gathered from the other ranks");
}

void FlatParameters::start_gather() {
  if (const auto gathered = memory_.buffers().gathered; gathered && !buffer_.defined()) {
    buffer_ = options_.pool->take(gathered->numel, gathered->dtype, device());
  }
  try {
    wait_ = state_ == State::kOnGroup ? options_.reshard_group->all_gather_async(buffer_, part_)
                                      : group_.all_gather_async(buffer_, gather_input());
  } catch (...) {
    drop_gather();
    throw;
  }
}

void FlatParameters::wait_unsharded() {
  if (is_unsharded()) {
    // The current stream may be another one than that which has waited for the gather.
    if (gathered_by_) gathered_by_->order_current_stream().value_or_throw();
    return;
  }
  if (state_ != State::kGathering) {
    refuse_use(
        "wait_unsharded() was called without a gather in flight; call unshard_async() before, on "
        "all ranks");
  }
  try {
    std::exchange(wait_, nullptr)();
  } catch (const Error& error) {
    drop_gather();
    throw error.with_context(
        format("gathering the parameters {}, {}", options_.name, group_.rank_text()));
  } catch (...) {
    drop_gather();
    throw;
  }
  finish_gather();
}

void FlatParameters::drop_gather() {
  state_ = State::kSharded;
  end_private();
  guard("are not available, because gathering them from the other ranks failed");
  // The failed operation may still write to buffer_ and read part_, so the pool must not reuse
  // them.
  if (!keeps_buffer()) options_.pool->forget(std::exchange(buffer_, at::Tensor()));
  if (part_.defined()) options_.pool->forget(std::exchange(part_, at::Tensor()));
}

void FlatParameters::finish_gather() {
  flat_.clear_guard();
  end_private();
  if (!keeps_buffer()) flat_.set_memory(buffer_);
  if (part_.defined()) options_.pool->give_back(std::exchange(part_, at::Tensor()));
  state_ = State::kFull;
  is_stale_ = false;
  if (!device().is_cpu()) {
    gathered_by_ = std::make_shared<const device::StreamPoint>(
        device::StreamPoint::on_current_stream(device()));
  }
  show_state(gathered_);
  filled_ = gathered_;
  written_->begin();
}

void FlatParameters::show_state(const ShardState& state) {
  const ShardState shown = shown_.value_or(state);
  shown_ = state;
  if (shown == state) return;
  for (const NamedTensor& parameter : parameters_) {
    parameter.tensor.unsafeGetTensorImpl()->bump_version();
  }
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
  const bool is_to_check = is_unsharded() && !is_private_;
  state_ = State::kSharded;
  is_stale_ = false;
  end_private();
  free_buffer();
  if (part_.defined()) options_.pool->give_back(std::exchange(part_, at::Tensor()));
  guard(kSharded);
  if (is_to_check) check_unwritten();
}

void FlatParameters::free_buffer() {
  if (keeps_buffer() || !buffer_.defined()) return;
  flat_.set_memory(at::Tensor());
  options_.pool->give_back(std::exchange(buffer_, at::Tensor()));
}

void FlatParameters::reshard_onto_group() {
  if (state_ == State::kGathering) wait_unsharded();
  if (state_ == State::kOnGroup) return;
  if (!options_.reshard_group || keeps_buffer() || is_private_ || !is_unsharded()) {
    return reshard();
  }
  const int64_t numel = layout().numel() / options_.reshard_group->world_size();
  part_ = options_.pool->take(numel, compute_dtype(), device());
  const at::NoGradGuard no_grad;
  part_.copy_(buffer_.narrow(0, options_.reshard_group->rank() * numel, numel));
  state_ = State::kOnGroup;
  free_buffer();
  guard(kSharded);
  check_unwritten();
}

void FlatParameters::mark_stale() {
  if (state_ == State::kGathering) wait_unsharded();
  if (state_ == State::kOnGroup) reshard();
  if (state_ == State::kFull) {
    const bool is_to_check = is_unsharded() && !is_private_;
    is_stale_ = true;
    guard("have changed on the ranks that own them");
    if (is_to_check) check_unwritten();
  }
  // The check above takes another version for a write of the program, so this comes after it.
  show_state(state_of_shard());
}

void FlatParameters::make_private() {
  if (!is_unsharded()) {
    refuse_use(
        "make_private() needs the whole parameters; call unshard_async() and "
        "wait_unsharded() before");
  }
  is_private_ = true;
  if (private_.defined() || options_.keep_full || !(is_mapped() || shares_memory())) return;
  const at::NoGradGuard no_grad;
  private_ = options_.pool->take(layout().numel(), compute_dtype(), device());
  private_.copy_(buffer_);
  flat_.set_memory(private_);
}

void FlatParameters::end_private() {
  is_private_ = false;
  if (!private_.defined()) return;
  flat_.set_memory(buffer_);
  options_.pool->give_back(std::exchange(private_, at::Tensor()));
}

void FlatParameters::take_from_parameters() {
  const bool is_in_update = options_.fence->is_in_update();
  if (state_ != State::kFull || (is_stale_ && !is_in_update)) {
    refuse_use(
        "take_from_parameters() needs the whole parameters; call unshard_async() and "
        "wait_unsharded() before");
  }
  if (is_mapped() && !(private_.defined() && is_in_update)) {
    refuse_use(
        "take_from_parameters() of mapped parameters needs a private copy and an update; call "
        "make_private() before the program writes, and hold a ShardUpdate");
  }
  const at::NoGradGuard no_grad;
  if (shares_memory() && !private_.defined()) {
    // The shard is a part of the buffer, so there is nothing to copy; only its version changes.
    shard_.unsafeGetTensorImpl()->bump_version();
  } else {
    const at::Tensor own = own_part_of(private_.defined() ? private_ : buffer_);
    shard_.copy_(own.scalar_type() == dtype()
                     ? own
                     : at::where(own.eq(shard_.to(own.scalar_type())), shard_, own.to(dtype())));
  }
  is_stale_ = false;
  flat_.clear_guard();
  written_->begin();
  // The version of a mapped shard is incremented at the end of the update.
  filled_ = state_of_shard();
  if (is_mapped()) ++filled_->version;
  shown_ = filled_;
}

void FlatParameters::guard(const std::string& reason) {
  flat_.guard(format("The values of parameters {} {}. To use them, {}.", options_.name, reason,
                     options_.remedy));
}

}  // namespace cadre::shard
