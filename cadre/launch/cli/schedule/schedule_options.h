// The command line of `cadre schedule`.
//
// Threads: pure functions. Blocking: never. Lifetime: values.
// Errors: kInvalidArgument with the option and what was expected.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/schedule/check.h"
#include "cadre/core/schedule/generate.h"
#include "cadre/core/schedule/lowering.h"
#include "cadre/core/schedule/simulate.h"
#include "cadre/launch/cli/command.h"

namespace cadre::cli {

inline constexpr std::string_view kScheduleCommand = "cadre schedule";

// Each list has one value for all stages, or one for each stage; it is empty if not given.
struct StageTimes {
  std::vector<double> forward_ms;
  std::vector<double> backward_ms;
  std::vector<double> input_grad_ms;
  std::vector<double> weight_grad_ms;
  // The forward times of the layers, which are divided into the stages.
  std::vector<double> layer_ms;
};

struct ScheduleOptions {
  bool wants_help = false;
  bool wants_list = false;
  // Is nullopt if the schedule is read from csv_input.
  std::optional<PipelineScheduleOptions> generated;
  std::string csv_input;
  std::optional<PipelineLowering> lowering;
  PipelineLimits limits;
  StageTimes times;
  double message_ms = 0;
  double overlap_share = 0;
  // The paths for the schedule and for its timeline. An empty path means no output; "-" means
  // standard output, which only one of the two may use.
  std::string csv_output;
  std::string json_output;
};

Result<ScheduleOptions> parse_schedule_options(Words words);

// The costs of every stage, and, if layers are given, the first layer of each stage
// (split_layers()).
struct ScheduleCosts {
  PipelineCosts costs;
  std::vector<size_t> layer_begins;
};

Result<ScheduleCosts> make_costs(const ScheduleOptions& options, int num_stages);

}  // namespace cadre::cli
