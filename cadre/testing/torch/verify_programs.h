// Programs for the tests of verify(), which compares parallel training with one process. Ranks are
// threads. Models and data are deterministic.
//
// Threads: verify_on_ranks() makes one for each rank. Blocking: until all ranks have ended.
// Errors: what a rank throws fails the test.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/testing/torch/fsdp_models.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/verify/verify_strategies.h"

namespace cadre::testing {

// Runs `verify` on every rank; all must report the same text.
inline VerifyReport verify_on_ranks(
    int world_size, const std::function<VerifyReport(const ProcessGroup& group)>& verify) {
  std::vector<VerifyReport> reports(static_cast<size_t>(world_size));
  const auto result = run_groups(
      world_size, [&](const ProcessGroup& group) { reports[group.rank()] = verify(group); });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const VerifyReport& report : reports) EXPECT_EQ(report.to_text(), reports[0].to_text());
  return reports[0];
}

inline const StrategyReport& report_of(const VerifyReport& report, const std::string& strategy) {
  const auto found = std::ranges::find(report.strategies, strategy, &StrategyReport::strategy);
  if (found != report.strategies.end()) return *found;
  ADD_FAILURE() << "no " << strategy << " in\n" << report.to_text();
  return report.strategies.at(0);
}

inline std::vector<std::string> names_of(const VerifyReport& report) {
  std::vector<std::string> names;
  for (const StrategyReport& strategy : report.strategies) names.push_back(strategy.strategy);
  return names;
}

// A model with two independent layers, so that a defect of one does not change the gradients of the
// other.
struct TwoHeads : nn::Module {
  TwoHeads() {
    left = register_module("left", nn::Linear(4, 3));
    right = register_module("right", nn::Linear(4, 3));
    to(torch::kDouble);
    set_values(*this);
  }
  Tensor forward(const Tensor& x) { return left(x) + right_factor * right(x); }
  nn::Linear left{nullptr}, right{nullptr};
  double right_factor = 1;
};

inline Tensor rows_of_step(int64_t step) {
  constexpr int64_t kRows = 8;
  return torch::sin(torch::arange(kRows * 4, torch::kDouble) * 0.7 + static_cast<double>(step))
      .view({kRows, 4});
}

}  // namespace cadre::testing
