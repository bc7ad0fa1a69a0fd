// Verifies that a configuration trains the same model on the processes of a job, under every
// strategy, as in one process.
//
// The reference is the plain model in one process with whole batches, the trainer's optimizer and
// torch's clip_grad_norm_. It is compared with what `cadre train` runs: the trainer's strategies,
// each process with its share of the same batches. Only `json_path` is written.
//
// Threads: one. Blocking: collective; returns when every strategy has run. Lifetime: keeps nothing.
// Errors: CommonError for an invalid configuration or request; those of the group.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/os/system.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/train/trainer/config/config.h"
#include "cadre/train/verify/verify_report.h"

namespace cadre::train {

struct VerifyRequest {
  int64_t num_steps = 5;          // at most run.steps
  std::string dtype = "float32";  // the dtype of the whole computation: float32 or float64
  // Words that select cases, see select_strategy_cases(); if empty, all cases are verified.
  std::vector<std::string> strategies = {};
  std::string json_path = {};  // the path for the report as JSON; empty: no file is written
};

struct VerifyContext {
  ProcessGroup world;
  os::System& system;
  std::function<void(std::string_view)> print;  // called on rank 0 only
  // Where both trainings are. A device is that of `world`, and the current one of this thread.
  c10::Device device = c10::Device(c10::DeviceType::CPU);
};

// Runs the verification. Prints its progress, then the table of results.
VerifyReport verify_config(const Config& config, const VerifyRequest& request,
                           const VerifyContext& context);

// Returns the report as a JSON object; a number that is NaN or infinite is written as null.
std::string json_of(const VerifyReport& report, const VerifyRequest& request);

}  // namespace cadre::train
