#include "cadre/parallel/reduction/agreement/forward_ledger.h"

#include <algorithm>
#include <limits>
#include <ranges>
#include <utility>

namespace cadre::reduction {

namespace {

// A derivative here is a call of autograd::grad(create_graph=true). A backward may pass through its
// graph even after the outputs of the forward were destroyed. The end of that graph's life cannot
// be observed, so the entry of the forward is kept for this number of further forwards.
constexpr int64_t kNumForwardsAfterADerivative = 100;

constexpr uint64_t kOpen = std::numeric_limits<uint64_t>::max();

}  // namespace

std::shared_ptr<Forward> ForwardLedger::enter(const Entering& entering) {
  std::erase_if(entries_, [this](const Entry& entry) { return is_of_no_more_use(entry); });
  auto forward = std::make_shared<Forward>(Forward{.number = ++last_number_});
  entries_.push_back({.number = last_number_,
                      .num_samples = entering.num_samples,
                      .is_synchronized = entering.is_synchronized,
                      .place = entering.is_synchronized ? next_place_++ : 0,
                      .forward = forward});
  return forward;
}

bool ForwardLedger::is_of_no_more_use(const Entry& entry) const {
  if (entry.state == State::kWaiting || !entry.forward.expired()) return false;
  return entry.derivatives.empty() || entry.number + kNumForwardsAfterADerivative < last_number_;
}

ForwardLedger::Entry* ForwardLedger::find(int64_t number) {
  const auto found = std::ranges::lower_bound(entries_, number, {}, &Entry::number);
  return found != entries_.end() && found->number == number ? &*found : nullptr;
}

void ForwardLedger::set_returned(int64_t number) {
  if (Entry* entry = find(number)) entry->has_returned = true;
}

void ForwardLedger::set_passed(int64_t number) {
  if (Entry* entry = find(number)) entry->is_passed = true;
}

void ForwardLedger::begin_derivative(int64_t number) {
  Entry* entry = find(number);
  if (entry == nullptr) return;
  // If one backward passes several outputs of a forward, the derivative begins at the first of
  // them.
  if (!entry->derivatives.empty() && entry->derivatives.back().end == kOpen) return;
  entry->derivatives.push_back({.first = wrap::next_sequence(), .end = kOpen});
}

void ForwardLedger::end_derivatives() {
  for (Entry& entry : entries_) {
    if (!entry.derivatives.empty() && entry.derivatives.back().end == kOpen) {
      entry.derivatives.back().end = wrap::next_sequence();
    }
  }
}

CarriedForward ForwardLedger::carried(const Entry& entry) const {
  const bool is_counted = entry.accumulation == accumulation_;
  return {.number = entry.number,
          .num_samples = is_counted ? 0 : entry.num_samples,
          .passed = nullptr,
          .is_counted = is_counted};
}

std::vector<CarriedForward> ForwardLedger::take(const Forward* reached, const Backward& backward) {
  std::vector<uint64_t> sequences;
  const bool has_derivatives =
      std::ranges::any_of(entries_, [](const Entry& entry) { return !entry.derivatives.empty(); });
  if (has_derivatives) sequences = wrap::sequences_of_current_backward();
  const auto passes = [&sequences](const Derivative& derivative) {
    const auto node = std::ranges::lower_bound(sequences, derivative.first);
    return node != sequences.end() && *node < derivative.end;
  };
  std::vector<CarriedForward> found;
  for (Entry& entry : std::views::reverse(entries_)) {
    const std::shared_ptr<Forward> forward = entry.forward.lock();
    const bool passes_output =
        forward && (forward.get() == reached ||
                    std::ranges::any_of(forward->outputs, wrap::current_backward_passes));
    if (!passes_output && std::ranges::none_of(entry.derivatives, passes)) continue;
    entry.state = State::kTaken;
    found.push_back(carried(entry));
    if (passes_output) found.back().passed = forward;
  }
  if (!found.empty()) return found;
  for (Entry& entry : std::views::reverse(entries_)) {
    if (entry.state != State::kWaiting || !entry.has_returned) continue;
    if (backward.is_accumulated && entry.is_synchronized) continue;
    entry.state = State::kTaken;
    found.push_back(carried(entry));
    found.back().is_certain = false;
    break;
  }
  return found;
}

std::vector<CarriedForward> ForwardLedger::may_be_carried() const {
  std::vector<CarriedForward> found;
  for (const Entry& entry : std::views::reverse(entries_)) {
    if (entry.state != State::kWaiting || !entry.has_returned) continue;
    found.push_back(carried(entry));
    found.back().is_certain = false;
  }
  return found;
}

void ForwardLedger::set_accumulated(int64_t number) {
  if (Entry* entry = find(number)) entry->accumulation = accumulation_;
}

StepPosition ForwardLedger::position(int64_t newest) const {
  StepPosition position;
  for (const Entry& entry : entries_) {
    if (!entry.is_synchronized || entry.state != State::kWaiting) continue;
    ++(entry.number < newest ? position.num_older : position.num_newer);
    position.places |= 1 << std::min(entry.place, StepPosition::kMaxPlace);
  }
  return position;
}

void ForwardLedger::end_pass(int64_t newest) {
  next_place_ = 0;
  for (Entry& entry : entries_) {
    if (!entry.is_synchronized || entry.state != State::kWaiting) continue;
    if (entry.number > newest) entry.place = next_place_++;
  }
}

void ForwardLedger::forgive_before(int64_t number, const Forgiving& forgiving) {
  for (Entry& entry : entries_) {
    if (entry.number >= number || entry.state != State::kWaiting) continue;
    entry.state = State::kForgiven;
    entry.forgiven_in = forgiving.step;
    if (forgiving.is_usual) entry.is_passed = true;
  }
}

bool ForwardLedger::is_lost(const Entry& entry) {
  return entry.state == State::kForgiven && entry.is_synchronized && !entry.is_passed &&
         entry.derivatives.empty() && entry.forward.expired();
}

ForwardLedger::Lost ForwardLedger::lost() const {
  Lost lost;
  for (const Entry& entry : entries_) {
    if (is_lost(entry) && lost.count++ == 0) lost.step = entry.forgiven_in;
  }
  return lost;
}

}  // namespace cadre::reduction
