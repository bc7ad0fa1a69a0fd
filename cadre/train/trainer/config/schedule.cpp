#include "cadre/train/trainer/config/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace cadre::train {
namespace {

constexpr int64_t kMaxDefaultWarmup = 50;

}  // namespace

int64_t resolved_warmup_steps(const ScheduleConfig& schedule, int64_t num_steps) {
  if (schedule.warmup_steps >= 0) return schedule.warmup_steps;
  return std::min(num_steps / 10, kMaxDefaultWarmup);
}

double learning_rate_at(int64_t step, int64_t num_steps, const OptimizerConfig& optimizer,
                        const ScheduleConfig& schedule) {
  const double peak = optimizer.learning_rate;
  if (step < schedule.warmup_steps) {
    return peak * static_cast<double>(step) / static_cast<double>(schedule.warmup_steps);
  }
  if (schedule.kind == "constant") return peak;
  if (schedule.kind == "step") {
    const int64_t num_falls = (step - 1) / schedule.step_size;
    return peak * std::pow(schedule.gamma, static_cast<double>(num_falls));
  }
  const auto decay_steps =
      static_cast<double>(std::max<int64_t>(num_steps - schedule.warmup_steps, 1));
  const double progress =
      std::min(static_cast<double>(step - schedule.warmup_steps) / decay_steps, 1.0);
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * cosine);
}

}  // namespace cadre::train
