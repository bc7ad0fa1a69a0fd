#include "cadre/train/trainer/strategy/run_layout.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cadre/core/base/error.h"

namespace cadre::train {
namespace {

Config gpt_with(const ParallelConfig& parallel) {
  Config config;
  config.model = {.layers = 4, .heads = 4, .width = 16, .context = 16};
  config.run.global_batch_size = 8;
  config.parallel = parallel;
  return config;
}

std::string refusal(const Config& config, int world_size) {
  try {
    check_layout(config, world_size);
    return "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.message();
  }
}

std::string refusal(const ParallelConfig& parallel, int world_size) {
  return refusal(gpt_with(parallel), world_size);
}

TEST(RunLayout, DegreesDivideTheProcesses) {
  EXPECT_EQ(refusal({.tensor = 2, .pipeline = 2}, 8), "accepted");
  EXPECT_EQ(refusal({.tensor = 2, .pipeline = 2}, 6),
            "tensor 2 * pipeline 2 takes 4 processes, and the 6 processes of this job are not a "
            "multiple of that: start a multiple of 4 processes, or change parallel.tensor, "
            "pipeline, context or expert");
  EXPECT_EQ(refusal({.strategy = "single", .tensor = 2}, 4),
            "parallel.strategy is single, but tensor 2 on 4 processes makes 2 groups with "
            "different samples: choose ddp, zero1, zero2, fsdp or hsdp, or start 2 processes");
  EXPECT_EQ(refusal({.strategy = "hsdp", .replicas = 2, .tensor = 2}, 6),
            "parallel.replicas is 2, which does not divide 3, the number of groups that each have "
            "the whole model (tensor 2 on 6 processes)");
}

TEST(RunLayout, SizesOfTheModelDivide) {
  EXPECT_EQ(refusal({.tensor = 3}, 3),
            "parallel.tensor is 3, which does not divide the 4 heads of model.heads");
  EXPECT_EQ(refusal({.pipeline = 3}, 3),
            "parallel.pipeline makes 3 stages (parallel.pipeline * parallel.virtual_stages), which "
            "do not divide the 4 blocks of model.layers");
  EXPECT_EQ(refusal({.context = 3}, 3),
            "parallel.context is 3: twice that, 6, must divide the 16 tokens of model.context, so "
            "that causal attention is equal work for all of its processes");
  EXPECT_EQ(refusal({.tensor = 2, .context = 4, .attention = "all_to_all"}, 8),
            "parallel.attention is all_to_all, but parallel.context, 4, does not divide the 2 "
            "heads that a process has: choose ring");
  EXPECT_EQ(refusal({.sequence = true}, 2),
            "parallel.sequence divides the tokens among the processes of parallel.tensor, which is "
            "1: set parallel.tensor, or parallel.sequence=false");
  Config odd = gpt_with({.tensor = 4, .sequence = true});
  odd.model.context = 18;
  EXPECT_EQ(refusal(odd, 4),
            "parallel.sequence divides the 18 tokens that a process has of a sample among the 4 "
            "processes of parallel.tensor, which do not divide them");
  Config mlp = gpt_with({.tensor = 2});
  mlp.model.kind = "mlp";
  EXPECT_EQ(refusal(mlp, 2),
            "parallel.tensor divides the gpt only, and model.kind is mlp: choose 1");
}

Config experts_with(const ParallelConfig& parallel) {
  Config config = gpt_with(parallel);
  config.model.experts = 8;
  return config;
}

TEST(RunLayout, ExpertsAreDividedAmongProcessesWithDifferentSamples) {
  EXPECT_EQ(refusal(experts_with({.tensor = 2, .context = 2, .expert = 2}), 8), "accepted");
  const Degrees degrees = degrees_of({.tensor = 2, .expert = 2}, 12);
  EXPECT_EQ(degrees.data, 3);
  EXPECT_EQ(degrees.num_shares(), 6);
  EXPECT_EQ(layout_name({.tensor = 2, .expert = 4}), "ddp, expert 4, tensor 2");
  EXPECT_EQ(refusal({.expert = 2}, 2),
            "parallel.expert is 2, but model.experts is 0, so there are no experts to divide: set "
            "model.experts, or leave the key out");
  EXPECT_EQ(refusal(experts_with({.expert = 3}), 3),
            "parallel.expert is 3, which does not divide the 8 experts of model.experts");
  EXPECT_EQ(
      refusal(experts_with({.expert = 4}), 6),
      "expert 4 takes 4 processes, and the 6 processes of this job are not a multiple of that: "
      "start a multiple of 4 processes, or change parallel.tensor, pipeline, context or expert");
  EXPECT_EQ(refusal(experts_with({.strategy = "hsdp", .replicas = 2, .expert = 2}), 2),
            "parallel.replicas is 2, which does not divide 1, the number of groups that each have "
            "the whole model (expert 2 on 2 processes)");
}

TEST(RunLayout, WhatExpertsDoNotHaveIsRefused) {
  EXPECT_EQ(refusal(experts_with({.pipeline = 2}), 2),
            "parallel.pipeline is 2, but model.experts is 8, and the load-balancing loss of a step "
            "is not the mean of those of the microbatches of a pipeline: choose 1");
  EXPECT_EQ(refusal(experts_with({.tensor = 2, .sequence = true}), 2),
            "parallel.sequence divides the tokens between the matrices, but each process of "
            "parallel.tensor gives all tokens to the experts: choose false");
  Config config = experts_with({.strategy = "single"});
  config.run.accumulate = 2;
  EXPECT_EQ(refusal(config, 1),
            "run.accumulate is 2, but the load-balancing loss of a step is not the mean of those "
            "of its parts, and model.experts is 8: choose 1; model.checkpoint_activations=blocks "
            "saves memory, too");
  config.model.auxiliary_loss = 0;
  EXPECT_EQ(refusal(config, 1), "accepted");
  config.model.capacity_factor = 1.5;
  EXPECT_EQ(refusal(config, 1),
            "run.accumulate is 2, but model.capacity_factor limits the tokens of an expert in a "
            "whole step, and model.experts is 8: choose 1; model.checkpoint_activations=blocks "
            "saves memory, too");
  config = experts_with({.pipeline = 2});
  config.model.auxiliary_loss = 0;
  EXPECT_EQ(refusal(config, 2),
            "parallel.pipeline is 2, but model.experts is 8, and the trainer does not divide the "
            "experts of a pipeline's stages: choose 1");
  config = experts_with({.context = 2});
  config.model.capacity_factor = 1.5;
  EXPECT_EQ(refusal(config, 2),
            "model.capacity_factor is 1.5, which drops the last tokens of a step, but the "
            "processes of parallel.context, 2, have other orders of the tokens than one process: "
            "choose 0, or parallel.context=1");
  config = experts_with({.strategy = "fsdp", .parameter_dtype = "bfloat16"});
  EXPECT_EQ(refusal(config, 2),
            "parallel.parameter_dtype is bfloat16, but a gpt with experts computes and reduces in "
            "float32: choose float32");
}

TEST(RunLayout, MicrobatchesDivideTheBatchAndSuitTheSchedule) {
  EXPECT_EQ(refusal({.pipeline = 2, .microbatches = 3}, 4),
            "parallel.microbatches is 3, which does not divide the 4 samples that each of the 2 "
            "pipelines is given of run.global_batch_size");
  EXPECT_EQ(refusal({.pipeline = 2}, 6),
            "run.global_batch_size is 8, which is not a multiple of the number of pipelines, 3, "
            "that these processes form");
  EXPECT_EQ(refusal({.microbatches = 2}, 2),
            "parallel.microbatches is 2, but parallel.pipeline is 1, so there is no pipeline: set "
            "parallel.pipeline, or leave the key out");
  EXPECT_EQ(
      refusal({.pipeline = 2, .schedule = "zb-v"}, 2),
      "parallel.virtual_stages is 1, but parallel.schedule is zb-v, which has exactly 2 stages "
      "on each process: choose 2, or another schedule");
  EXPECT_EQ(
      refusal({.pipeline = 2, .virtual_stages = 2}, 2),
      "parallel.virtual_stages is 2, but parallel.schedule is 1f1b, which has exactly 1 stage "
      "on each process: choose 1, or another schedule");
  const ParallelConfig dual{.pipeline = 2, .schedule = "dualpipe-v", .virtual_stages = 2};
  Config few = gpt_with(dual);
  few.run.global_batch_size = 3;
  EXPECT_EQ(
      refusal(few, 2),
      "run.global_batch_size is 3, which gives each pipeline 3 samples; no divisor of that number "
      "is a number of microbatches that parallel.schedule allows: dualpipe-v: 3 microbatches for 4 "
      "stages (2 ranks with 2 each); it needs at least as many microbatches as stages");
  few.run.global_batch_size = 8;
  few.parallel.microbatches = 2;
  EXPECT_EQ(refusal(few, 2),
            "parallel.microbatches is 2, which parallel.schedule does not allow: dualpipe-v: 2 "
            "microbatches for 4 stages (2 ranks with 2 each); it needs at least as many "
            "microbatches as stages");
  const Config config = gpt_with({.pipeline = 2});
  EXPECT_EQ(pipeline_schedule(config, degrees_of(config.parallel, 2)).num_microbatches, 8);
  EXPECT_EQ(pipeline_schedule(config, degrees_of(config.parallel, 4)).num_microbatches, 4);
}

TEST(RunLayout, WhatAPipelineDoesNotHaveIsRefused) {
  EXPECT_EQ(refusal({.strategy = "zero1", .pipeline = 2}, 4),
            "parallel.strategy is zero1, which a pipeline does not support: choose ddp, or fsdp, "
            "which shards optimizer state and gradients, too");
  EXPECT_EQ(refusal({.strategy = "fsdp", .form = "mapped", .pipeline = 2}, 4),
            "parallel.form is mapped, but the shards of a pipeline's stages are gathered, and kept "
            "in memory: choose parallel.form=auto");
  EXPECT_EQ(
      refusal({.strategy = "fsdp", .pipeline = 2, .schedule = "zb-v", .virtual_stages = 2}, 4),
      "parallel.schedule is zb-v, which puts the first and the last stage on one process, "
      "where fsdp would shard the tied weight twice: choose model.tied=false, ddp, or "
      "another schedule");
  Config config = gpt_with({.pipeline = 2});
  config.run.accumulate = 2;
  EXPECT_EQ(refusal(config, 2),
            "run.accumulate is 2, but a pipeline computes its samples in microbatches, which save "
            "the same memory: choose 1, and set parallel.microbatches");
  config = gpt_with({.tensor = 2});
  config.run.autocast = "bfloat16";
  EXPECT_EQ(refusal(config, 2),
            "run.autocast is bfloat16 where a model is divided by parallel.tensor, pipeline or "
            "context, which compute and reduce in float32: choose float32");
}

// Returns parallel.replicas for processes on these hosts.
int64_t placed(ParallelConfig parallel, const std::vector<int>& host_of_rank) {
  parallel.strategy = "hsdp";
  place_replicas(parallel, host_of_rank);
  return parallel.replicas;
}

TEST(RunLayout, ShardsOfHsdpAreInsideOfHosts) {
  const std::vector<int> two_by_four{0, 0, 0, 0, 1, 1, 1, 1};
  EXPECT_EQ(placed({}, two_by_four), 2);
  EXPECT_EQ(placed({}, {0, 0, 1, 1, 2, 2, 3, 3}), 4);
  EXPECT_EQ(placed({.tensor = 2}, two_by_four), 2);    // 2 shards of 2 processes fill a host
  EXPECT_EQ(placed({.tensor = 4}, two_by_four), 2);    // the model fills a host
  EXPECT_EQ(placed({.pipeline = 2}, two_by_four), 0);  // each stage is on one host
  EXPECT_EQ(placed({.replicas = 8}, two_by_four), 8);
  EXPECT_EQ(placed({}, {0, 0, 0, 0}), 0);
  EXPECT_EQ(placed({}, {0, 0, 0, 1}), 0);
  EXPECT_EQ(placed({}, {0, 1, 0, 1}), 0);
  EXPECT_EQ(num_replicas({}), 2);
  EXPECT_EQ(num_replicas({.replicas = 3}), 3);
}

}  // namespace
}  // namespace cadre::train
