// Shows that training under every strategy equals training in one process, for the program's own
// module.
//
//   const auto report = cadre::verify_strategies(
//       world, /*make_module=*/[] { return std::make_shared<Net>(); },
//       /*make_batch=*/[](int64_t) { return load_batch(); },  // of all ranks together
//                                                             /*loss=*/
//       [](auto& model, const Tensor& batch) { return loss_of(model(batch), batch); },
//       torch::optim::AdamWOptions(1e-3), {.num_steps = 5});
//   if (world.rank() == 0) std::printf("%s\n", report.to_text().c_str());
//
// Declares:
// - `verify_strategies()`, `VerifyOptions`: trains under all strategies and compares.
// - `VerifyReport`, `StrategyReport`, `Deviation`, `NearCase`: the result.
// - `StrategyCase`, `name_of()`: a strategy with its settings, and its name.
// - `StrategySpace`, `all_strategy_cases()`, `select_strategy_cases()`: list the cases that exist,
//   and select those to run.
// - `run_verification()`, `VerificationOptions`, `VerificationProgram`, `VerifyBounds`: the
//   verification of type-erased functions.
// - `VerifyProgram`, `PlainModel`, `MadeModule`, `MakesModule`, `call_make_module()`: the user's
//   functions with their types.
//
// Guide: docs/guide/training/verify.md. PyTorch: none.
#pragma once

#include "cadre/train/verify/strategy_case.h"
#include "cadre/train/verify/verification.h"
#include "cadre/train/verify/verify_program.h"
#include "cadre/train/verify/verify_report.h"
#include "cadre/train/verify/verify_strategies.h"
