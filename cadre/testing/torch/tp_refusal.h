// A helper for tests of plans that parallelize_module() must refuse, in a group of one rank.
//
// Threads: one. Blocking: runs a rank.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn.h>

#include <string>
#include <vector>

#include "cadre/parallel/tp/parallelize_module.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre::testing {

// Calls parallelize_module() with the plan, which must throw kInvalidArgument, and returns the
// error.
inline std::string refusal_of_plan(torch::nn::Module& module, const std::vector<PlanEntry>& plan) {
  std::string message;
  const auto result = run_groups(1, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"tp", 1}});
    message =
        error_of([&] { parallelize_module(module, mesh, plan); }, ErrorCode::kInvalidArgument);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return message;
}

}  // namespace cadre::testing
