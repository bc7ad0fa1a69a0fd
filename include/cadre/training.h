// One program for every strategy: the module, its optimizer and a word.
//
//   cadre::Training training{std::make_shared<Net>(), torch::optim::AdamWOptions(1e-3), world};
//   training.backward(loss_of(training(x), y));  // x, y: this rank's rows of the batch
//   training.step();
//   const auto loss_between = [](const Tensor& out, const Tensor& to) { return loss_of(out, to); };
//   const cadre::StepResult result = training.step(x, y, loss_between);  // all of these at once
//   const double loss = training.mean(result.loss);  // of all ranks
//   // cadre run --nproc-per-node 2 --strategy fsdp ./net
//
// Declares:
// - `Training`: a module and its optimizer under a strategy, its loader, and its snapshots.
// - `StepResult`: the loss and the norm of a step.
// - `TrainingOptions`, `ModelDegrees`, `kStrategyVariable`: the strategy and its options.
// - `TrainingDivision`: the ranks along each axis.
// - `ParameterGroup`, `WholeParameter`: options of the optimizer for some parameters.
// - `OptimizerOf`, `OptionsOfOptimizer`: which optimizer belongs to which options.
//
// Guide: docs/guide/training/one-program.md. Others: Accelerate's Accelerator, Lightning's Fabric.
#pragma once

#include "cadre/tensor/optim/optimizer_of.h"
#include "cadre/train/training/training.h"
#include "cadre/train/training/training_division.h"
#include "cadre/train/training/training_options.h"
