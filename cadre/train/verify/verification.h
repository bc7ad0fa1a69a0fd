// Trains a model under every strategy and compares each step with training in one process.
//
// Threads: one. Blocking: collective; returns when every strategy has run. Lifetime: keeps nothing.
// Errors: kInvalidArgument for options, on all ranks; the errors of the group. An error of the
// user's program under a strategy is stored in the report of that strategy instead.
// verify_strategies.h is the interface for programs.
//
// The reference runs on rank 0 in a world of one process: its functions get a group of one rank,
// and a group of several ranks throws at every call there (tensor/group/operands/world_of_one.h).
// After each step rank 0 sends its loss, gradients and parameters to the other ranks, so that every
// rank can compare its own values with them. Each rank keeps them for all steps: 2 * steps copies
// of the parameters, or 3 * steps if the bounds are given for each element. Each case has its own
// group of all ranks, so a case that fails on one rank does not end the others.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/train/verify/stepped_training.h"
#include "cadre/train/verify/strategy_case.h"
#include "cadre/train/verify/verify_report.h"

namespace cadre {

// The largest relative differences that are accepted. The defaults depend on the dtype of the
// parameters:
//
// float64: 1e-10; float32: 1e-5. They are relative to the loss, or to the largest value of the
// gradient or parameter.
//
// Ranks add the same terms in another order than one process, so each value differs by a few
// roundings of partial sums; the defaults are 10^6 and 10^2 roundings. A gradient whose exact value
// is 0 (of a bias before a normalization) consists of rounding errors of larger values. Therefore a
// gradient's difference is relative to its own largest value or, if that is more, to 1 % of the
// largest gradient of the model.
//
// In float32 the verification measures two more effects. First, rounding errors grow in training:
// where a gradient is close to zero, at the kink of a ReLU or of a maximum, and with the learning
// rate. So rank 0 trains the plain module a second time, from parameters with random errors of 4
// roundings, and with random errors of a tenth of the bound in the gradients. Bounds of losses and
// gradients are at least 4 times the difference of that training in the same step, but at most
// 1e-2. That training uses no wrapper of Cadre, so defects of the wrappers cannot increase the
// bounds. Second, optimizers that divide by the magnitude of the gradient (Adam, RMSprop, Adagrad)
// amplify differences in the last bits of a gradient close to zero. The bound of an element is
// therefore at least twice the largest difference that the optimizer makes for gradients that
// differ by their bound: up, down, away from zero and towards it in every element of every step.
//
// Other dtypes have no defaults: all three bounds must be given. A bound is at least 0 and less
// than 1; others are refused.
struct VerifyBounds {
  std::optional<double> loss = {};
  std::optional<double> gradients = {};
  std::optional<double> parameters = {};
};

struct VerificationOptions {
  int64_t num_steps = 5;
  VerifyBounds bounds = {};
  // The longest time that other ranks wait for rank 0 to compute a step of the reference.
  Duration step_timeout = std::chrono::minutes(10);
  // Is called on rank 0 with one line, without a newline, about what the verification is doing. May
  // be an empty function.
  std::function<void(std::string_view)> progress = {};
};

struct VerificationProgram {
  // Must not communicate. Is called once on every rank, with a group of only this rank; only rank 0
  // trains the result.
  std::function<std::unique_ptr<verify::ReferenceTraining>(const ProcessGroup& alone)>
      make_reference;
  // Collective. `group` is the group of the case.
  std::function<std::unique_ptr<verify::SteppedTraining>(const StrategyCase&,
                                                         const ProcessGroup& group)>
      make_training;
  // Must not communicate. Returns why a case cannot run, equal on all ranks, or an empty text if it
  // can run. May be an empty function.
  std::function<std::string(const StrategyCase&)> why_not = {};
};

CADRE_EXPORT VerifyReport run_verification(const ProcessGroup& world,
                                           const VerificationProgram& program,
                                           const std::vector<StrategyCase>& cases,
                                           const VerificationOptions& options);

}  // namespace cadre
