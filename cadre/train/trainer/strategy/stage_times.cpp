#include "cadre/train/trainer/strategy/stage_times.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>

#include "cadre/core/base/format.h"

namespace cadre::train {
namespace {

std::string in_ms(double milliseconds) {
  return cadre::format("{:.{}f} ms", milliseconds, milliseconds < 10 ? 2 : 1);
}

// Returns the upper median of the times of all stages except `one`.
double median_of_others(std::span<const StageTime> stages, size_t one) {
  std::vector<double> others;
  for (size_t i = 0; i < stages.size(); ++i) {
    if (i != one) others.push_back(stages[i].milliseconds);
  }
  std::ranges::sort(others);
  return others[others.size() / 2];
}

}  // namespace

std::string describe(std::span<const StageTime> stages) {
  std::string text = "stages compute for";
  for (size_t i = 0; i < stages.size(); ++i) {
    text += cadre::format("{} {}", i == 0 ? "" : ",", in_ms(stages[i].milliseconds));
  }
  text += " a microbatch";
  const auto slowest = std::ranges::max_element(stages, {}, &StageTime::milliseconds);
  const auto stage = static_cast<size_t>(slowest - stages.begin());
  const double others = stages.size() < 2 ? 0 : median_of_others(stages, stage);
  if (others <= 0 || slowest->milliseconds < kSlowStage * others) return text;
  return text + cadre::format(
                    "; stage {} on rank {} takes {:.1f} times as long as the others, which "
                    "wait for it: look for other work on its cores",
                    stage, slowest->rank, slowest->milliseconds / others);
}

void StageTimes::add(std::span<const Duration> of_step, int64_t num_microbatches) {
  for (size_t stage = 0; stage < totals_.size(); ++stage) totals_[stage] += of_step[stage];
  num_microbatches_ += num_microbatches;
}

std::vector<StageTime> StageTimes::of_all_processes(const ProcessGroup& world) const {
  if (num_microbatches_ == 0) return {};
  const auto num_stages = static_cast<int64_t>(totals_.size());
  const at::Tensor own = at::zeros({num_stages}, at::kDouble);
  for (size_t stage = 0; stage < totals_.size(); ++stage) {
    const std::chrono::duration<double, std::milli> total = totals_[stage];
    own[static_cast<int64_t>(stage)] = total.count() / static_cast<double>(num_microbatches_);
  }
  const at::Tensor all = at::empty({world.world_size(), num_stages}, at::kDouble);
  world.all_gather(all, own);
  std::vector<StageTime> stages;
  for (int64_t stage = 0; stage < num_stages; ++stage) {
    const auto [milliseconds, rank] = all.select(1, stage).max(0);
    stages.push_back({milliseconds.item<double>(), static_cast<int>(rank.item<int64_t>())});
  }
  return stages;
}

}  // namespace cadre::train
