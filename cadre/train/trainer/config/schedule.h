// The learning rate of each step.
//
// Threads: a pure function. Blocking: never. Errors: none.
// Source: linear warm-up, then half a cosine down to a fraction of the peak (Loshchilov and Hutter,
// "SGDR", 2017, without restarts); or torch.optim.lr_scheduler.StepLR.
#pragma once

#include <cstdint>

#include "cadre/train/trainer/config/config.h"

namespace cadre::train {

// Returns schedule.warmup_steps; if that is -1, a tenth of `num_steps`, but at most 50.
int64_t resolved_warmup_steps(const ScheduleConfig& schedule, int64_t num_steps);

// Returns the learning rate of step 1 .. num_steps. It reaches its peak in step `warmup_steps` and
// its final value in the last step. With kind step it falls after every `step_size` steps, counted
// from the first step. REQUIRES: a resolved number of warm-up steps; for kind step, a step_size
// above 0.
double learning_rate_at(int64_t step, int64_t num_steps, const OptimizerConfig& optimizer,
                        const ScheduleConfig& schedule);

}  // namespace cadre::train
