// Pipeline parallelism: the stages of a model lie on different ranks, and microbatches pass through
// them.
//
//   cadre::Pipeline pipeline({{net, {.stage = world.rank(), .num_stages = 2}}}, world,
//                            {.schedule = "1f1b", .num_microbatches = 8});
//   torch::optim::AdamW optimizer(net->parameters());
//   pipeline.step(x, y, [](const Tensor& output, const Tensor& target) {
//     return torch::mse_loss(output, target);
//   });
//   optimizer.step();
//
// Declares:
// - `Pipeline`, `PipelineOptions`: the wrapper.
// - `pipeline_of()`, `StageDivision`: makes the stages from the layers of a whole model.
// - `PipelineStage`, `PipelineStageOptions`, `PipelineMicrobatch`: one stage of this rank, and the
//   description of a microbatch that its forward gets.
// - `StageParameter`: the stage and name of a parameter, an argument of tie_parameters().
// - `PipelineBatch`, `PipelineStepOptions`, `PipelineResult`: the inputs and targets of a step, its
//   options and its result.
// - `PipelineLoss`: the loss of a microbatch.
// - `PipelineError`: an error with the action of the schedule that this rank was running.
//
// Guide: docs/guide/parallel/pipeline-parallel.md. PyTorch: torch.distributed.pipelining.
#pragma once

#include "cadre/parallel/pp/layered/layered_pipeline.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/parallel/pp/pipeline_error.h"
#include "cadre/parallel/pp/pipeline_loss.h"
#include "cadre/parallel/pp/pipeline_stage.h"
