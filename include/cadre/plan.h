// What each rank will hold in memory and receive in a step under each strategy, before a run.
//
//   const cadre::ModelSizes sizes = cadre::model_sizes_of(net);
//   const cadre::MemoryPlan plan = cadre::plan_memory(
//       sizes, {.strategy = cadre::DataStrategy::kFsdp, .num_ranks = 8, .ranks_per_host = 8});
//   std::printf("%lld bytes, %lld received\n", static_cast<long long>(plan.held.total()),
//               static_cast<long long>(plan.traffic.received_bytes()));
//
// Declares:
// - `plan_memory()`, `PlanOptions`: computes the plan.
// - `MemoryPlan`, `PlannedPart`: the result, as a whole and for each unit.
// - `HeldBytes`, `StepTraffic`, `OperationTraffic`: bytes in memory; calls and bytes of a step.
// - `ModelSizes`, `model_sizes_of()`: the input: the sizes of a model.
//
// Guide: docs/guide/training/memory.md. PyTorch: none; DeepSpeed:
// estimate_zero3_model_states_mem_needs.
#pragma once

#include "cadre/parallel/plan/memory_plan.h"
#include "cadre/parallel/plan/model_sizes.h"
