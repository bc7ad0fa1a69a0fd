#include "cadre/parallel/reduction/agreement/replica_watch.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/hooks/replica_check.h"

namespace cadre::reduction {

namespace {

enum Reason : uint32_t { kWrittenByForward = 1, kLoneStep = 2, kUnlike = 4 };

// Returns, as text, the ranks whose suspicion has the bit `reason`.
std::string ranks_with(const Attention& attention, uint32_t reason, int world_size) {
  const at::Tensor flags = at::zeros({world_size, 1}, at::kByte);
  for (int rank = 0; rank < world_size; ++rank) {
    flags.mutable_data_ptr<uint8_t>()[rank] = (attention.suspicion(rank) & reason) != 0 ? 1 : 0;
  }
  return ranks_text(flags, 0, 1);
}

// Returns the probable reason why the values of a parameter differ between ranks, and the remedy.
std::string reason_of(const Attention& attention, bool is_written, int world_size) {
  if (attention.some_have_suspicion(kLoneStep)) {
    return format(
        "the program has changed the parameters on {} after a backward() under no_sync() and "
        "before the reduction of its gradients: reduce the last part of a step without no_sync(), "
        "or call reduce_gradients() before the optimizer's step",
        ranks_with(attention, kLoneStep, world_size));
  }
  if (is_written) {
    return format(
        "forward() writes to it (on {}), as an Embedding with max_norm does: compute the changed "
        "weight as a new tensor in forward(), or change it alike on all ranks after the "
        "optimizer's step",
        ranks_with(attention, kWrittenByForward, world_size));
  }
  if (attention.num_writes_differ()) {
    return "the program has changed the parameters a different number of times on these ranks "
           "since the last reduction, for example by loading a file on one of them only, or in an "
           "optimizer that computes its loss several times in a step (LBFGS), from a loss of one "
           "rank: change parameters on all ranks, and give such an optimizer the mean over ranks, "
           "so that all ranks do the same";
  }
  return "the program has changed the parameters differently on these ranks, for example through "
         "data() on one of them only, or by an optimizer with different options: make the same "
         "changes on all ranks";
}

}  // namespace

ReplicaWatch::ReplicaWatch(std::vector<NamedTensor> parameters, ParameterValues values,
                           WrittenError written_error)
    : values_(values),
      written_error_(std::move(written_error)),
      watch_(std::move(parameters)),
      is_written_(watch_.parameters().size()) {
  if (values_ == ParameterValues::kUnwatched) return;
  last_num_writes_ = watch_.num_writes();
  take_samples();
}

ReplicaWatch::State ReplicaWatch::state() const {
  return {.num_writes = watch_.num_writes(), .samples = watch_.samples()};
}

bool ReplicaWatch::is_sharded(size_t parameter) const {
  if (values_ != ParameterValues::kSharded) return values_ == ParameterValues::kUnwatched;
  return watch_.parameters()[parameter].tensor.requires_grad();
}

void ReplicaWatch::take_samples() {
  if (values_ == ParameterValues::kUnwatched) return;
  const uint64_t digest = watch_.samples(num_passes_);
  samples_ = static_cast<uint32_t>(digest ^ digest >> 32);
}

void ReplicaWatch::begin_forward() {
  if (values_ == ParameterValues::kUnwatched) return;
  // If the last forward ended by an exception, end_forward() was not called, so it is called now:
  // writes of that forward to whole parameters count, too.
  if (std::exchange(is_in_forward_, false) && values_ == ParameterValues::kWhole) {
    is_in_forward_ = true;
    end_forward();
  }
  if (has_stepped_alone()) has_lone_step_ = true;
  watch_.begin();
  is_in_forward_ = true;
}

void ReplicaWatch::end_forward() {
  if (!std::exchange(is_in_forward_, false)) return;
  for (const size_t parameter : watch_.written()) is_written_[parameter] = true;
}

void ReplicaWatch::set_written(std::string_view name) {
  const auto found = std::ranges::find(watch_.parameters(), name, &NamedTensor::name);
  if (found == watch_.parameters().end()) return;
  is_written_[static_cast<size_t>(found - watch_.parameters().begin())] = true;
}

void ReplicaWatch::set_has_local_gradients() {
  if (values_ != ParameterValues::kWhole) return;
  if (has_stepped_alone()) has_lone_step_ = true;
  local_state_ = state();
}

uint32_t ReplicaWatch::suspicion() const {
  const bool is_written = std::ranges::find(is_written_, true) != is_written_.end();
  const bool has_lone_step = has_lone_step_ || has_stepped_alone();
  return (is_written ? kWrittenByForward : 0U) | (has_lone_step ? kLoneStep : 0U) |
         (is_unlike_ ? kUnlike : 0U);
}

// Writes to sharded parameters are counted, too: after a gather the parameters are whole, and the
// program may write to them.
uint8_t ReplicaWatch::num_writes() const {
  if (values_ == ParameterValues::kUnwatched) return 0;
  return static_cast<uint8_t>(watch_.num_writes() - last_num_writes_);
}

std::vector<size_t> ReplicaWatch::written_by_some(const wrap::LocatedGroup& group) const {
  const auto count = static_cast<int64_t>(is_written_.size());
  const at::Tensor flags = at::zeros({count}, at::kByte);
  for (int64_t i = 0; i < count; ++i) {
    flags.mutable_data_ptr<uint8_t>()[i] = is_written_[static_cast<size_t>(i)] ? 1 : 0;
  }
  group.all_reduce(flags, ReduceOp::kMax);
  std::vector<size_t> places;
  for (int64_t i = 0; i < count; ++i) {
    if (flags.const_data_ptr<uint8_t>()[i] != 0) places.push_back(static_cast<size_t>(i));
  }
  return places;
}

void ReplicaWatch::refuse_written(size_t parameter, const std::string& ranks, const Wrapper& here) {
  const std::string& name = watch_.parameters()[parameter].name;
  if (values_ == ParameterValues::kUnwatched && written_error_) {
    is_written_.assign(is_written_.size(), false);
    throw written_error_(name, ranks).with_context(here.place());
  }
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: forward() writes to the parameter \"{}\" (on {}), but its values are in "
                     "shards on the ranks, so what is written to the whole parameter is lost when "
                     "it is gathered again. Compute the changed weight as a new tensor in "
                     "forward(), or change the shards after the optimizer's step. To continue, "
                     "load the values of a snapshot",
                     here.place(), name, ranks));
}

void ReplicaWatch::check(const Attention& attention, const Wrapper& here,
                         const wrap::LocatedGroup& group) {
  const std::vector<size_t> written = written_by_some(group);
  for (const size_t place : written) {
    if (!is_sharded(place)) continue;
    refuse_written(place, ranks_with(attention, kWrittenByForward, group.world_size()), here);
  }
  const std::vector<NamedTensor>& parameters = watch_.parameters();
  std::vector<size_t> places = written;
  if (attention.some_have_suspicion(kLoneStep | kUnlike) || attention.num_writes_differ() ||
      attention.samples_differ()) {
    places.resize(parameters.size());
    std::iota(places.begin(), places.end(), size_t{0});
  }
  std::vector<at::Tensor> compared;
  for (const size_t place : places) compared.push_back(parameters[place].tensor);
  if (const auto unlike = wrap::first_unlike(compared, group)) {
    is_unlike_ = true;  // each later pass compares the values until they are equal again
    const size_t place = places[unlike->place];
    const bool is_written = std::ranges::find(written, place) != written.end();
    throw Error(
        ErrorCode::kInvalidArgument,
        format("{}: the parameter \"{}\" has other values on rank {} than on rank 0, because {}. "
               "To continue, load the same values on all ranks",
               here.place(), parameters[place].name, unlike->rank,
               reason_of(attention, is_written, group.world_size())));
  }
  is_written_.assign(is_written_.size(), false);
  is_unlike_ = false;
  has_lone_step_ = false;
  local_state_.reset();
}

void ReplicaWatch::end_pass() {
  local_state_.reset();
  has_lone_step_ = false;
  ++num_passes_;
  if (values_ != ParameterValues::kUnwatched) last_num_writes_ = watch_.num_writes();
}

}  // namespace cadre::reduction
