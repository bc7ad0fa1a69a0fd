#include "cadre/parallel/plan/unit_residency.h"

#include <algorithm>
#include <memory>
#include <ranges>
#include <utility>

#include "cadre/parallel/fsdp/unit_schedule.h"

namespace cadre {

namespace {

using parallel::UnitMemory;
using parallel::UnitSchedule;

struct Counts {
  Residency residency;
  int64_t full_bytes = 0;
};

// A unit that has the same states as FlatParameters, but only counts its memory.
class CountedUnit final : public UnitMemory {
 public:
  CountedUnit(size_t unit, int64_t full_bytes, Counts& counts)
      : unit_(unit), full_bytes_(full_bytes), counts_(counts) {}

  bool is_full() const override { return has_buffer_ && !is_stale_; }
  void gather() override {
    if (is_full()) return;
    is_stale_ = false;
    ++counts_.residency.num_gathers[unit_];
    if (std::exchange(has_buffer_, true)) return;
    counts_.full_bytes += full_bytes_;
    counts_.residency.peak_bytes = std::max(counts_.residency.peak_bytes, counts_.full_bytes);
  }
  void wait_full() override {}
  void release() override {
    if (std::exchange(has_buffer_, false)) counts_.full_bytes -= full_bytes_;
  }
  void release_onto_group() override { release(); }  // not supported in plans
  void mark_stale() override { is_stale_ = true; }
  bool is_outdated() const override { return false; }

 private:
  size_t unit_;
  int64_t full_bytes_;
  Counts& counts_;
  bool has_buffer_ = false;
  bool is_stale_ = false;
};

// Runs training steps: calls the methods of the schedule as autograd and the program would.
class Steps {
 public:
  Steps(std::span<const ResidentUnit> units, const StepShape& shape)
      : units_(units),
        shape_(shape),
        children_(units.size()),
        calls_(units.size()),
        schedule_(make_units(), options()) {
    for (size_t unit = 1; unit < units_.size(); ++unit) {
      children_[units_[unit].parent].push_back(unit);
    }
    const auto first = std::ranges::find(units_, true, &ResidentUnit::has_trained);
    first_trained_ = static_cast<size_t>(first - units_.begin());
  }

  Residency run() {
    // Two steps show in which order the units are used; the third one is counted.
    constexpr int kNumSteps = 3;
    for (int step = 0; step < kNumSteps; ++step) {
      counts_.residency.num_gathers.assign(units_.size(), 0);
      counts_.residency.num_comparisons = 0;
      for (int64_t pass = 1; pass <= shape_.accumulate; ++pass) {
        forward(0);
        if (first_trained_ == units_.size()) continue;
        backward(0);
        schedule_.end_backward({.is_reduced = pass == shape_.accumulate, .creates_graph = false});
      }
      ++num_updates_;
    }
    return counts_.residency;
  }

 private:
  // Treats the parameters of a unit as one trained parameter, whose index is that of the unit.
  std::vector<UnitSchedule::Unit> make_units() {
    std::vector<UnitSchedule::Unit> made;
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      const ResidentUnit& resident = units_[unit];
      UnitSchedule::Unit& last = made.emplace_back();
      last.memory = std::make_unique<CountedUnit>(unit, resident.full_bytes, counts_);
      last.parent = resident.parent;
      last.reshard = resident.reshard;
      if (resident.has_trained) last.parameters = {unit};
      last.has_frozen = resident.has_frozen;
    }
    return made;
  }

  UnitSchedule::Options options() {
    return {.num_prefetched = shape_.num_prefetched,
            .compare = [this](const UnitSchedule::Use&) { ++counts_.residency.num_comparisons; },
            .num_updates = [this] { return num_updates_; }};
  }

  void forward(size_t unit) {
    calls_[unit] = std::make_shared<UnitSchedule::Call>(UnitSchedule::Call{.unit = unit});
    // Inputs of a unit require grad only if a trained parameter comes before it.
    if (unit > first_trained_) {
      calls_[unit]->inputs.push_back({.address = nullptr, .sequence = unit});
    }
    unit == 0 ? schedule_.begin_forward(/*with_grad=*/true) : schedule_.before_forward(unit);
    for (const size_t child : children_[unit]) forward(child);
    unit == 0 ? schedule_.end_forward() : schedule_.after_forward(unit);
  }

  // Returns whether the outputs of a unit require grad. They do not if the unit ends before the
  // first trained parameter.
  bool requires_grad(size_t unit) const {
    size_t around = first_trained_;
    while (around > unit) around = units_[around].parent;
    return unit >= first_trained_ || around == unit;
  }

  void backward(size_t unit) {
    if (!requires_grad(unit)) return;
    schedule_.reached_output(calls_[unit], {.address = nullptr, .sequence = 0});
    for (const size_t child : std::views::reverse(children_[unit])) backward(child);
    if (units_[unit].has_trained) schedule_.gradient_arrived(unit);
    schedule_.passed_input(*calls_[unit]);
  }

  std::span<const ResidentUnit> units_;
  StepShape shape_;
  std::vector<std::vector<size_t>> children_;
  std::vector<std::shared_ptr<UnitSchedule::Call>> calls_;
  size_t first_trained_ = 0;
  uint64_t num_updates_ = 0;
  Counts counts_;
  UnitSchedule schedule_;
};

}  // namespace

Residency residency_of(std::span<const ResidentUnit> units, const StepShape& step) {
  return units.empty() ? Residency{} : Steps(units, step).run();
}

}  // namespace cadre
