#include "cadre/parallel/plan/unit_residency.h"

#include <algorithm>

namespace cadre {

namespace {

// One step, event by event.
class Step {
 public:
  Step(std::span<const ResidentUnit> units, const StepShape& shape)
      : units_(units), shape_(shape), is_full_(units.size(), false) {
    residency_.num_gathers.resize(units.size(), 0);
    for (size_t unit = 0; unit < units.size(); ++unit) forward_.push_back(unit);
    list_left(0);
    // The outputs of units before the first trained parameter require no gradient.
    const auto first = std::ranges::find(units, true, &ResidentUnit::has_trained);
    const auto first_trained = static_cast<size_t>(first - units.begin());
    backward_.assign(left_.rbegin(), left_.rend());
    std::erase_if(backward_, [&](size_t unit) {
      return unit < first_trained && !is_around(unit, first_trained);
    });
  }

  Residency run() {
    for (int64_t pass = 0; pass < shape_.accumulate; ++pass) {
      forward();
      backward(/*reduces=*/pass + 1 == shape_.accumulate);
    }
    return residency_;
  }

 private:
  // The order in which a forward leaves the units: children before their parent.
  void list_left(size_t unit) {
    for (size_t child = unit + 1; child < units_.size(); ++child) {
      if (units_[child].parent == unit) list_left(child);
    }
    left_.push_back(unit);
  }

  bool is_around(size_t unit, size_t inner) const {
    while (inner != 0 && inner < units_.size() && inner != unit) inner = units_[inner].parent;
    return inner == unit;
  }

  void gather(size_t unit) {
    if (is_full_[unit]) return;
    is_full_[unit] = true;
    ++residency_.num_gathers[unit];
    full_bytes_ += units_[unit].full_bytes;
    residency_.peak_bytes = std::max(residency_.peak_bytes, full_bytes_);
  }

  void release(size_t unit) {
    if (!is_full_[unit]) return;
    is_full_[unit] = false;
    full_bytes_ -= units_[unit].full_bytes;
  }

  void use(const std::vector<size_t>& order, size_t place) {
    gather(order[place]);
    if (shape_.num_prefetched > 0 && place + 1 < order.size()) gather(order[place + 1]);
  }

  void forward() {
    size_t num_left = 0;
    for (size_t place = 0; place < forward_.size(); ++place) {
      use(forward_, place);
      // The units that end before the next one begins.
      while (num_left < left_.size() && left_[num_left] <= place &&
             (place + 1 == forward_.size() || !is_around(left_[num_left], place + 1))) {
        const size_t unit = left_[num_left++];
        if (units_[unit].reshard == Reshard::kAfterForward) release(unit);
      }
    }
  }

  // A unit is freed when its gradients are reduced, which is after those of its nested units.
  void backward(bool reduces) {
    for (size_t place = 0; place < backward_.size(); ++place) {
      use(backward_, place);
      for (size_t unit = backward_[place]; unit != 0; unit = units_[unit].parent) {
        const bool is_done =
            place + 1 == backward_.size() || !is_around(unit, backward_[place + 1]);
        if (!is_done) break;
        if (units_[unit].reshard != Reshard::kAfterReduction) release(unit);
      }
    }
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      if (reduces || units_[unit].reshard != Reshard::kAfterReduction) release(unit);
    }
  }

  std::span<const ResidentUnit> units_;
  StepShape shape_;
  std::vector<size_t> forward_;
  std::vector<size_t> left_;
  std::vector<size_t> backward_;
  std::vector<bool> is_full_;
  int64_t full_bytes_ = 0;
  Residency residency_;
};

}  // namespace

Residency residency_of(std::span<const ResidentUnit> units, const StepShape& step) {
  return units.empty() ? Residency{} : Step(units, step).run();
}

}  // namespace cadre
