// Verifies, for your own module, that training on the ranks of a group equals training in one
// process. It trains a few steps under every strategy and compares losses, gradients and
// parameters.
//
//   report = cadre::verify_strategies(
//       world,
//       /*make_module=*/[] { return std::make_shared<Net>(); },
//       /*make_batch=*/[](int64_t step) { return rows_of_step(step); },  // the global batch
//       /*loss=*/[](auto& model, const torch::Tensor& rows) { return mse(model(rows), rows); },
//       torch::optim::AdamWOptions(1e-3));
//   report.is_within(), report.to_text()
//
// Threads: one. Blocking: collective; until all strategies have run. Lifetime: keeps nothing.
// Errors: kInvalidArgument for options, for functions that do not match each other, and for batches
// that ranks cannot divide; the group's errors. If a wrapper refuses the module, the error is in
// the report of its strategy. docs/guide/training/verify.md describes the bounds and how to find
// the cause of a deviation.
#pragma once

#include <concepts>
#include <memory>
#include <utility>
#include <vector>

#include "cadre/tensor/group/process_group.h"
#include "cadre/train/verify/strategy_case.h"
#include "cadre/train/verify/trainings.h"
#include "cadre/train/verify/verification.h"
#include "cadre/train/verify/verify_program.h"
#include "cadre/train/verify/verify_report.h"

namespace cadre {

// make_module() returns a std::shared_ptr to a module whose forward() may have any arguments, or a
// holder. It is called once for each strategy; every call must construct the same module, and the
// generator is seeded before each call. make_batch(step), with steps counted from 1, returns the
// batch of all ranks together, the same on every rank and in every call: see batch_rows.h. The rows
// of a batch must differ, so that a rank that computes with the rows of another rank is noticed.
// loss(model, rows) calls the model (a wrapper, or the plain module) as often as it needs and
// returns the mean loss over the rows. A rank may have no rows if the batch has fewer rows than
// ranks times parts.
//
// A program that communicates (a layer with a collective, a factor world_size()) takes the group as
// a further argument: make_module(group), loss(model, rows, group). The group has one rank in the
// reference, which is a world of one process, and all ranks under a strategy. In the reference, a
// captured group of several ranks throws. But a world size that the program read from such a group
// before cannot be noticed; do not use one. Disable random numbers in the module and the loss
// (dropout): they differ between ranks. optimizer: options of AdamW, Adam, SGD, RMSprop, Adagrad or
// Adadelta. All ranks must pass equal arguments.
template <MakesModule MakeModule, std::invocable<int64_t> MakeBatch, typename Loss,
          OptionsOfOptimizer OptimizerOptions>
VerifyReport verify_strategies(const ProcessGroup& world, MakeModule make_module,
                               MakeBatch make_batch, Loss loss, const OptimizerOptions& optimizer,
                               const VerifyOptions& options = {}) {
  using Program = VerifyProgram<MakeModule, MakeBatch, Loss, OptimizerOptions>;
  static_assert(verify::BatchOfRows<typename Program::Rows>,
                "cadre::verify_strategies: make_batch(step) must return a tensor, a cadre::Batch, "
                "or tuples, pairs, vectors, maps or optionals of tensors");
  const auto program = std::make_shared<Program>(
      Program{std::move(make_module), std::move(make_batch), std::move(loss), optimizer, options});
  std::vector<StrategyCase> cases;
  int num_not_selected = 0;
  verify::prepare_on_all_ranks(world, [&] {
    const auto all = all_strategy_cases({.world_size = world.world_size()});
    cases = select_strategy_cases(all, options.strategies, world.world_size());
    num_not_selected = static_cast<int>(all.size() - cases.size());
    if (options.num_steps < 1) return;  // the verification itself throws an error for this value
    verify::check_rows_of_ranks<Program>(*program, world.world_size());
  });
  VerifyReport report = run_verification(
      world,
      {.make_reference =
           [&](const ProcessGroup& alone) {
             return std::make_unique<verify::PlainTraining<Program>>(program, alone);
           },
       .make_training =
           [&](const StrategyCase& strategy, const ProcessGroup& group) {
             return verify::make_wrapped_training(program, group, strategy);
           }},
      cases,
      {.num_steps = options.num_steps, .bounds = options.bounds, .progress = options.progress});
  report.num_not_selected = num_not_selected;
  return report;
}

}  // namespace cadre
