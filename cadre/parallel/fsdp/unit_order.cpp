#include "cadre/parallel/fsdp/unit_order.h"

#include <algorithm>
#include <utility>

namespace cadre::parallel {

void UnitOrder::begin(Pass pass) {
  // Predicts the order of the first backward: the root first, as in the forward, then the units in
  // the reverse order of the forward.
  std::vector<size_t>& backward = known_[index(Pass::kBackward)];
  if (pass == Pass::kBackward && backward.empty()) {
    backward = known_[index(Pass::kForward)];
    if (!backward.empty()) std::reverse(backward.begin() + 1, backward.end());
    is_expected_ = false;
  }
  if (last_) {
    std::optional<Pass>& follows = follows_[index(*last_)];
    if (follows != pass) is_expected_ = false;
    follows = pass;
  }
  pass_ = pass;
  current_.clear();
}

bool UnitOrder::visit(size_t unit) {
  const std::vector<size_t>& known = known_[index(pass_)];
  const size_t place = current_.size();
  current_.push_back(unit);
  if (place >= known.size() || known[place] != unit) is_expected_ = false;
  return is_expected_;
}

std::optional<size_t> UnitOrder::next() const {
  const std::vector<size_t>& known = known_[index(pass_)];
  const size_t place = current_.size();
  if (place == 0 || place >= known.size() || known[place - 1] != current_[place - 1]) {
    return std::nullopt;
  }
  return known[place];
}

std::optional<size_t> UnitOrder::after(size_t unit) const {
  const std::vector<size_t>& known = known_[index(pass_)];
  const size_t place = current_.size();
  if (place + 1 >= known.size() || known[place] != unit) return std::nullopt;
  return known[place + 1];
}

void UnitOrder::end() {
  // The pass has used fewer units than predicted, and the other ranks may still use the missing
  // units.
  if (current_.size() < known_[index(pass_)].size()) is_expected_ = false;
  known_[index(pass_)] = std::exchange(current_, {});
  last_ = pass_;
}

void UnitOrder::abandon() {
  current_.clear();
  last_.reset();
  doubt();
}

}  // namespace cadre::parallel
