// Schedules of pipeline parallelism as values: made, checked, simulated, printed and exchanged with
// PyTorch.
//
//   const auto schedule =
//       cadre::make_pipeline_schedule(
//           {.kind = cadre::PipelineScheduleKind::kZbH1, .num_ranks = 4, .num_microbatches = 16})
//           .value_or_throw();
//   cadre::check_pipeline(schedule, {.max_live_activations = 4}).value_or_throw();
//   const auto timeline =
//       cadre::simulate_pipeline(schedule, {.message_ms = 0.2}).value_or_throw();
//   std::printf("%s\n", cadre::timeline_summary(schedule, timeline).c_str());
//   const auto lowered = cadre::lower_pipeline(schedule, {}).value_or_throw();
//
// Declares:
// - `PipelineSchedule`: the actions of each rank in one training step.
// - `PipelineAction`, `PipelineActionKind`: one action.
// - `to_text()`, `parse_pipeline_action()`, `to_string()`: the text of an action, and back.
// - `is_computation()`, `is_message()`, `has_microbatch()`, `leaves_of()`: properties of an action,
//   and the actions that a combined one consists of.
// - `make_pipeline_schedule()`, `PipelineScheduleOptions`: makes a schedule by its name and
//   numbers.
// - `PipelineScheduleKind`, `PipelineScheduleInfo`, `pipeline_schedules()`, `info_of()`,
//   `find_pipeline_schedule()`: the list of known schedules.
// - `StagePlacement`, `PipelineShape`, `place_stages()`: which rank has which stage.
// - `has_messages()`, `peak_live_activations()`: properties of a schedule.
// - `check_pipeline()`, `PipelineLimits`: checks that a schedule computes one training step.
// - `lower_pipeline()`, `PipelineLowering`, `ReceivePlacement`: adds sends and receives.
// - `split_layers()`: divides layers among stages by their costs.
// - `to_csv()`, `parse_pipeline_csv()`: a schedule in PyTorch's CSV format.
// - `simulate_pipeline()`, `PipelineCosts`, `StageCosts`: when each action runs, for given times.
// - `PipelineTimeline`, `TimedAction`: the result of the simulation.
// - `timeline_table()`, `timeline_summary()`, `timeline_json()`, `milliseconds_text()`: a timeline
//   as text, and as JSON for a drawing.
//
// Guide: docs/guide/parallel/pipeline-schedules.md. PyTorch:
// torch.distributed.pipelining.schedules.
#pragma once

#include "cadre/core/schedule/action.h"
#include "cadre/core/schedule/check.h"
#include "cadre/core/schedule/generate.h"
#include "cadre/core/schedule/lowering.h"
#include "cadre/core/schedule/partition.h"
#include "cadre/core/schedule/schedule.h"
#include "cadre/core/schedule/schedule_csv.h"
#include "cadre/core/schedule/simulate.h"
#include "cadre/core/schedule/timeline_text.h"
