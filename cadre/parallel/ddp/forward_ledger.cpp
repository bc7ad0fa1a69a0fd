#include "cadre/parallel/ddp/forward_ledger.h"

#include <algorithm>

namespace cadre {

std::shared_ptr<Forward> ForwardLedger::enter(std::optional<int64_t> num_samples) {
  auto forward =
      std::make_shared<Forward>(Forward{.number = ++last_number_, .num_samples = num_samples});
  entries_.push_back({last_number_, num_samples.value_or(0), forward});
  return forward;
}

void ForwardLedger::take(int64_t number) {
  std::erase_if(entries_, [number](const Entry& entry) { return entry.number == number; });
}

int32_t ForwardLedger::num_left_behind(int64_t number, bool dropped_only) const {
  return static_cast<int32_t>(std::ranges::count_if(entries_, [&](const Entry& entry) {
    return entry.number < number && (!dropped_only || entry.forward.expired());
  }));
}

void ForwardLedger::forgive_before(int64_t number) {
  std::erase_if(entries_, [number](const Entry& entry) { return entry.number < number; });
}

int64_t ForwardLedger::num_samples() const {
  int64_t sum = 0;
  for (const Entry& entry : entries_) sum += entry.num_samples;
  return sum;
}

}  // namespace cadre
