// Returns the errors of parallelize_module() in a group of one rank.
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

// Returns the error for the plan. The module must stay unchanged. For tests that run no forward.
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
