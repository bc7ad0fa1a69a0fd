#include "cadre/reduction/agreement/replica_watch.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/wrap/replica_check.h"

namespace cadre::reduction {

namespace {

enum Reason : uint32_t { kWrittenByForward = 1, kLoneStep = 2 };

// (ranks, 1) of bytes, as ranks_text() takes it.
std::string ranks_with(const Attention& attention, uint32_t reason, int world_size) {
  const at::Tensor flags = at::zeros({world_size, 1}, at::kByte);
  for (int rank = 0; rank < world_size; ++rank) {
    flags.mutable_data_ptr<uint8_t>()[rank] = (attention.suspicion(rank) & reason) != 0 ? 1 : 0;
  }
  return ranks_text(flags, 0, 1);
}

bool any_has(const Attention& attention, uint32_t reason, int world_size) {
  for (int rank = 0; rank < world_size; ++rank) {
    if ((attention.suspicion(rank) & reason) != 0) return true;
  }
  return false;
}

}  // namespace

ReplicaWatch::ReplicaWatch(std::vector<NamedTensor> parameters, ParameterValues values,
                           WrittenError written_error)
    : values_(values),
      written_error_(std::move(written_error)),
      watch_(std::move(parameters)),
      is_written_(watch_.parameters().size()) {
  last_state_ = state();
}

ReplicaWatch::State ReplicaWatch::state() const {
  if (values_ != ParameterValues::kWhole) return {};
  return {.num_writes = watch_.num_writes(), .samples = watch_.samples()};
}

bool ReplicaWatch::is_sharded(size_t parameter) const {
  if (values_ != ParameterValues::kSharded) return values_ == ParameterValues::kUnwatched;
  return watch_.parameters()[parameter].tensor.requires_grad();
}

void ReplicaWatch::begin_forward() {
  if (values_ == ParameterValues::kUnwatched) return;
  // A forward that ended by an exception. What it wrote to whole values is compared like the rest.
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
  return (is_written ? kWrittenByForward : 0U) | (has_lone_step ? kLoneStep : 0U);
}

uint8_t ReplicaWatch::num_writes() const {
  if (values_ != ParameterValues::kWhole) return 0;
  const State now = state();
  const uint32_t num_writes = now.num_writes - last_state_.num_writes;
  const bool has_unseen = num_writes == 0 && now.samples != last_state_.samples;
  return static_cast<uint8_t>(num_writes + (has_unseen ? 1 : 0));
}

std::vector<size_t> ReplicaWatch::suspected(bool all, const wrap::LocatedGroup& group) const {
  const auto count = static_cast<int64_t>(is_written_.size());
  const at::Tensor flags = at::zeros({count}, at::kByte);
  for (int64_t i = 0; i < count; ++i) {
    flags.mutable_data_ptr<uint8_t>()[i] = all || is_written_[static_cast<size_t>(i)] ? 1 : 0;
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
                     "forward(), or change the shards after the optimizer's step. Load values to "
                     "continue",
                     here.place(), name, ranks));
}

void ReplicaWatch::check(const Attention& attention, const Wrapper& here,
                         const wrap::LocatedGroup& group) {
  const int world_size = group.world_size();
  const bool is_written = any_has(attention, kWrittenByForward, world_size);
  const bool has_lone_step = any_has(attention, kLoneStep, world_size);
  const bool all = has_lone_step || !is_written;
  const std::vector<NamedTensor>& parameters = watch_.parameters();
  const std::vector<size_t> places = suspected(all, group);
  std::vector<at::Tensor> compared;
  for (const size_t place : places) {
    if (is_sharded(place)) {
      refuse_written(place, ranks_with(attention, kWrittenByForward, world_size), here);
    }
    compared.push_back(parameters[place].tensor);
  }
  const auto unlike = wrap::first_unlike(compared, group);
  if (unlike) {
    // Until the values are equal again, each pass compares them.
    is_written_[places[unlike->place]] = true;
    std::string reason = format(
        "the program has changed the parameters a different number of times on these ranks "
        "since the last reduction, for example in an optimizer that computes its loss "
        "several times in a step (LBFGS), from a loss of one rank: give it the mean over "
        "ranks, so that all ranks do the same");
    if (has_lone_step) {
      reason = format(
          "the program has changed the parameters on {} after a backward() under "
          "no_sync() and before the reduction of its gradients: reduce the last part "
          "of a step without no_sync(), or call reduce_gradients() before the "
          "optimizer's step",
          ranks_with(attention, kLoneStep, world_size));
    } else if (is_written) {
      reason = format(
          "forward() writes to it (on {}), as an Embedding with max_norm does: compute "
          "the changed weight as a new tensor in forward(), or change it alike on all "
          "ranks after the optimizer's step",
          ranks_with(attention, kWrittenByForward, world_size));
    }
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: the parameter \"{}\" has other values on rank {} than on rank 0, "
                       "because {}. To continue, load the same values on all ranks",
                       here.place(), parameters[places[unlike->place]].name, unlike->rank, reason));
  }
  is_written_.assign(is_written_.size(), false);
  has_lone_step_ = false;
  local_state_.reset();
}

void ReplicaWatch::end_pass() {
  local_state_.reset();
  has_lone_step_ = false;
  last_state_ = state();
}

}  // namespace cadre::reduction
