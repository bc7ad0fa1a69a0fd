#include "cadre/parallel/fsdp/unit_schedule.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::parallel {

UnitSchedule::UnitSchedule(std::vector<Unit> units, Options options)
    : units_(std::move(units)), states_(units_.size()), options_(std::move(options)) {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    for (const size_t parameter : units_[unit].parameters) {
      unit_of_parameter_.resize(std::max(unit_of_parameter_.size(), parameter + 1));
      unit_of_parameter_[parameter] = unit;
    }
  }
}

UnitSchedule::~UnitSchedule() = default;

void UnitSchedule::refuse(const std::string& what, const std::string& remedy) const {
  throw Error(ErrorCode::kInvalidArgument,
              format("FullyShardedDataParallel, {}: {}. {}", options_.rank, what, remedy));
}

void UnitSchedule::begin_forward(bool with_grad) {
  if (phase_ == Phase::kSummoned) {
    refuse("forward() was called while summon_full_params() holds the full parameters",
           "First destroy the FullParameters object that it returned");
  }
  if (phase_ == Phase::kForward) {
    refuse("forward() was called inside of itself", "Call the submodules instead of the wrapper");
  }
  if (phase_ == Phase::kBackward) {
    refuse("forward() was called inside backward()",
           "To recompute activations, apply the recomputation to submodules and not to the whole "
           "model");
  }
  end_outside();
  mark_changed_stale();
  is_current_ = true;
  is_with_grad_ = with_grad;
  phase_ = Phase::kForward;
  begin_pass(with_grad ? UnitOrder::Pass::kForward : UnitOrder::Pass::kForwardWithoutGrad);
  try {
    use(0);
  } catch (...) {
    abandon();
    throw;
  }
}

void UnitSchedule::mark_changed_stale() {
  if (awaits_step_) awaits_step_ = options_.has_gradients();
  for (const Unit& unit : units_) {
    if (may_change_ || unit.memory->is_outdated()) unit.memory->mark_stale();
  }
}

void UnitSchedule::end_forward() {
  order_.end();
  phase_ = Phase::kIdle;
  if (keeps_all_) return;
  for (const Unit& unit : units_) release_after_forward(unit);
}

void UnitSchedule::before_forward(size_t unit) {
  if (is_outside() || phase_ == Phase::kSummoned) {
    refuse(format("unit \"{}\" was called outside of the wrapper's forward()", units_[unit].name),
           "Call the FullyShardedDataParallel, whose forward() calls its units. To call one module "
           "alone, copy its parameters under summon_full_params() into another module");
  }
  use(unit);
}

void UnitSchedule::after_forward(size_t unit) {
  // A forward inside of a backward recomputes activations. The unit stays full, because its
  // backward follows at once.
  if (phase_ == Phase::kBackward || keeps_all_) return;
  release_after_forward(units_[unit]);
  states_[unit].is_used = false;
}

void UnitSchedule::release_after_forward(const Unit& unit) {
  // If there is no backward, and shards may change, the next forward gathers the unit in any case.
  const bool is_gathered_again = !is_with_grad_ && may_change_;
  if (is_gathered_again || unit.reshard == Reshard::kAfterForward) {
    unit.memory->release();
  } else if (unit.reshard == Reshard::kOntoGroup) {
    unit.memory->release_onto_group();
  }
}

void UnitSchedule::fail_forward(size_t unit) noexcept {
  order_.doubt();
  if (phase_ == Phase::kForward) release_after_failure(unit);
}

void UnitSchedule::abandon() noexcept {
  const bool was_in_backward = std::exchange(phase_, Phase::kIdle) == Phase::kBackward;
  is_current_ = false;
  // Makes the next forward gather all units on all ranks, also those of which this rank keeps a
  // part below.
  if (was_in_backward) may_change_ = true;
  keeps_all_ = false;
  close_calls();
  order_.abandon();
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    const Unit& left = units_[unit];
    // The other ranks may still gather from this rank's part; see follow_others().
    const bool has_part = left.reshard == Reshard::kOntoGroup && !left.memory->is_full();
    if (!was_in_backward || !has_part) release_after_failure(unit);
  }
}

void UnitSchedule::release_after_failure(size_t unit) noexcept {
  try {
    units_[unit].memory->release();
  } catch (...) {
    // The gather has failed. The error is not lost: the group throws it again at the next gather.
  }
}

bool UnitSchedule::is_around(size_t outer, size_t unit) const {
  while (unit > outer) unit = units_[unit].parent;
  return unit == outer;
}

void UnitSchedule::leave_others(size_t unit) {
  // The root is around all units, so it is never among the others.
  for (size_t other = 1; other < units_.size(); ++other) {
    State& state = states_[other];
    if (!state.is_used || state.num_running > 0 || is_around(other, unit)) continue;
    if (phase_ == Phase::kBackward) {
      if (keeps_all_ || is_kept_in_backward(other, unit)) continue;
      units_[other].memory->release();
    } else if (!keeps_all_) {
      release_after_forward(units_[other]);
    }
    state.is_used = false;
  }
}

bool UnitSchedule::is_kept_in_backward(size_t other, size_t unit) const {
  const Reshard reshard = units_[other].reshard;
  if (reshard == Reshard::kAfterReduction) return true;
  if (states_[other].num_missing == 0) return false;
  if (reshard != Reshard::kAfterForward) return true;
  // The backward comes back to this unit: a loss has used it outside of forward(), as a penalty
  // does, or activations are computed again. It is kept if it is needed next.
  const std::optional<size_t> next = order_.after(unit);
  return !next || *next == other;
}

void UnitSchedule::expect_other_values() noexcept {
  if (!std::exchange(is_current_, false) || !is_outside()) return;
  for (const Unit& unit : units_) {
    try {
      unit.memory->mark_stale();
    } catch (...) {
      // A gather in flight has failed, which the group reports again at the next gather.
    }
  }
}

void UnitSchedule::begin_use(size_t unit) {
  State& state = states_[unit];
  if (phase_ == Phase::kIdle) begin_outside();
  if (phase_ == Phase::kOutside && !has_current_values()) {
    end_outside();
    begin_outside();
  }
  if (phase_ != Phase::kSummoned && !state.is_used) {
    leave_others(unit);
    use(unit);
    state.was_reached = true;
  }
  ++state.num_running;
}

void UnitSchedule::refuse_write(size_t unit) const {
  refuse(format("an operation writes to the parameters of {}, which are sharded",
                unit == 0 ? "the root" : format("unit \"{}\"", units_[unit].name)),
         "Make an optimizer from the wrapper (model.parameters()), not from the parameters of the "
         "module. To change values, hold summon_full_params() and write back");
}

void UnitSchedule::begin_outside() {
  if (!has_current_values()) {
    for (const Unit& unit : units_) unit.memory->mark_stale();
  }
  is_current_ = true;
  is_with_grad_ = true;
  phase_ = Phase::kOutside;
  begin_pass(UnitOrder::Pass::kOutside);
}

void UnitSchedule::end_outside() {
  if (phase_ != Phase::kOutside) return;
  order_.end();
  phase_ = Phase::kIdle;
  if (keeps_all_) return;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (states_[unit].is_used) release_after_forward(units_[unit]);
  }
}

void UnitSchedule::begin_backward() {
  if (phase_ == Phase::kBackward) return;
  end_outside();
  if (phase_ == Phase::kForward) {
    refuse("backward() was called inside forward()",
           "Call backward() after forward() has returned");
  }
  if (phase_ == Phase::kSummoned) {
    refuse("backward() was called while summon_full_params() holds the full parameters",
           "First destroy the FullParameters object that it returned");
  }
  phase_ = Phase::kBackward;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    states_[unit] = {.num_missing = units_[unit].parameters.size(),
                     .num_running = states_[unit].num_running};
  }
  has_accumulated_ = false;
  is_compared_ = false;
  has_backward_ = true;
  gathers_.clear();
  begin_pass(UnitOrder::Pass::kBackward);
}

void UnitSchedule::begin_reduction() {
  num_launched_ = 0;
  followed_.reset();
  if (phase_ != Phase::kBackward) has_backward_ = false;
}

bool UnitSchedule::knows_what_follows() const {
  return has_backward_ && !is_compared_ && gathers_.size() <= last_gathers_.size() &&
         std::equal(gathers_.begin(), gathers_.end(), last_gathers_.begin());
}

// Releases each unit before the gather after the next one, so that at most two units are full at a
// time.
void UnitSchedule::follow_others(size_t launch) {
  if (!knows_what_follows()) return;
  while (gathers_.size() < last_gathers_.size() &&
         last_gathers_[gathers_.size()].num_launched <= launch) {
    const Gather& next = last_gathers_[gathers_.size()];
    gathers_.push_back(next);
    UnitMemory& memory = *units_[next.unit].memory;
    if (memory.is_full()) memory.release();
    memory.gather();
    const auto before = std::exchange(followed_, next.unit);
    if (before && *before != next.unit) units_[*before].memory->release();
  }
}

void UnitSchedule::reached_output(const std::shared_ptr<Call>& call, const wrap::GraphNode& node) {
  begin_backward();
  // The output of this call may be the input of a later call of another unit. That unit's hook on
  // the same node runs only after this one, but the unit must be released before this unit is
  // gathered. So the later call is treated here as passed.
  const auto is_node = [&node](const wrap::GraphNode& input) {
    return input.address == node.address && input.sequence == node.sequence;
  };
  for (const std::weak_ptr<Call>& open : std::vector(open_calls_)) {
    const auto later = open.lock();
    if (later && later != call && std::ranges::any_of(later->inputs, is_node)) passed_input(*later);
  }
  State& state = states_[call->unit];
  state.was_reached = true;
  if (!call->inputs.empty() && !std::exchange(call->is_open, true)) {
    ++state.num_open;
    state.had_inputs = true;
    open_calls_.push_back(call);
  }
  use(call->unit);
}

void UnitSchedule::passed_input(Call& call) {
  if (phase_ != Phase::kBackward || !std::exchange(call.is_open, false)) return;
  std::erase_if(open_calls_, [&call](const std::weak_ptr<Call>& open) {
    const auto held = open.lock();
    return !held || held.get() == &call;
  });
  --states_[call.unit].num_open;
  release_if_done(call.unit);
}

void UnitSchedule::gradient_arrived(size_t parameter) {
  begin_backward();
  has_accumulated_ = true;
  const size_t unit = unit_of_parameter_[parameter];
  if (states_[unit].num_missing > 0) --states_[unit].num_missing;
  release_if_done(unit);
}

void UnitSchedule::release_if_done(size_t unit) {
  const State& state = states_[unit];
  if (unit == 0 || keeps_all_ || !state.was_reached) return;
  if (state.num_missing > 0 || state.num_open > 0 || state.num_running > 0) return;
  if (units_[unit].has_frozen && !state.had_inputs) return;
  // A unit with kAfterReduction stays full, so that the next forward under no_sync() need not
  // gather it.
  if (units_[unit].reshard == Reshard::kAfterReduction) return;
  units_[unit].memory->release();
  states_[unit].is_used = false;
}

void UnitSchedule::end_backward(const End& end) {
  order_.end();
  phase_ = Phase::kIdle;
  close_calls();
  keeps_all_ = end.creates_graph;
  if (end.is_reduced) {
    last_gathers_ = is_compared_ ? std::vector<Gather>() : gathers_;
    end_reduction();
    return;
  }
  if (has_accumulated_ && !awaits_step_) may_change_ = false;
  if (!keeps_all_) {
    release_all([](Reshard reshard) { return reshard != Reshard::kAfterReduction; });
  }
}

void UnitSchedule::end_reduction() {
  may_change_ = true;
  is_current_ = false;
  awaits_step_ = true;
  keeps_all_ = false;
  release_all([](Reshard) { return true; });
}

// Marks all calls as closed, also those whose inputs the backward did not reach.
void UnitSchedule::close_calls() {
  for (const std::weak_ptr<Call>& open : std::exchange(open_calls_, {})) {
    if (const auto call = open.lock()) call->is_open = false;
  }
}

void UnitSchedule::summon() {
  end_outside();
  if (phase_ != Phase::kIdle) {
    const bool is_summoned = phase_ == Phase::kSummoned;
    refuse(format("summon_full_params() was called {}",
                  is_summoned                 ? "while another FullParameters object exists"
                  : phase_ == Phase::kForward ? "inside forward()"
                                              : "inside backward()"),
           is_summoned ? "Destroy the other object first, on all ranks"
                       : "Call it outside of forward() and backward(), on all ranks");
  }
  compare({.pass = UnitOrder::Pass::kForwardWithoutGrad, .unit = units_.size()});
  phase_ = Phase::kSummoned;
  try {
    for (const Unit& unit : units_) {
      unit.memory->mark_stale();
      unit.memory->gather();
    }
    for (const Unit& unit : units_) unit.memory->wait_full();
  } catch (...) {
    abandon();
    throw;
  }
}

void UnitSchedule::dismiss() {
  abandon();
}

void UnitSchedule::begin_pass(UnitOrder::Pass pass) {
  const uint64_t num_updates = options_.num_updates();
  if (std::exchange(num_updates_, num_updates) != num_updates) {
    order_.begin(UnitOrder::Pass::kUpdate);
    order_.end();
  }
  order_.begin(pass);
  for (State& state : states_) state.is_used = false;
}

// Starts a gather, unless the unit is full or is being gathered.
void UnitSchedule::gather(size_t unit) {
  if (phase_ == Phase::kBackward && !units_[unit].memory->is_full()) {
    gathers_.push_back({.unit = unit, .num_launched = num_launched_});
  }
  units_[unit].memory->gather();
}

void UnitSchedule::compare(const Use& use) {
  is_compared_ = true;
  options_.compare({.pass = use.pass, .unit = use.unit, .num_updates = options_.num_updates()});
}

void UnitSchedule::use(size_t unit) {
  if (!order_.visit(unit)) {
    compare({.pass = order_.pass(), .unit = unit});
    order_.set_agreed();
  }
  try {
    gather(unit);
    // The gather of the next unit is started after that of this unit, and overlaps with the
    // computation.
    prefetch();
  } catch (const Error& error) {
    throw error.with_context(
        format("FullyShardedDataParallel, {}, gathering {}", options_.rank,
               unit == 0 ? "the root's parameters" : format("unit \"{}\"", units_[unit].name)));
  }
  units_[unit].memory->wait_full();
  states_[unit].is_used = true;
}

void UnitSchedule::prefetch() {
  if (options_.num_prefetched == 0) return;
  if (const auto next = order_.next()) gather(*next);
}

void UnitSchedule::release_all(bool (*is_released)(Reshard)) {
  for_all(units_, [&](const Unit& unit) {
    if (is_released(unit.reshard)) unit.memory->release();
  });
}

}  // namespace cadre::parallel
