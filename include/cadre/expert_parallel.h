// Mixture-of-experts layers, whose experts ranks may divide.
//
//   cadre::MixtureOfExperts layer(cadre::MixtureOfExpertsOptions{
//       .features = 512, .hidden_features = 2048, .num_experts = 16, .num_selected = 2});
//   const cadre::DeviceMesh mesh(world, {{"dp", 2}, {"ep", 4}});
//   const cadre::ExpertParallel experts(*layer,
//                                       mesh);  // each rank of "ep" keeps 4 of 16 experts
//   const auto output = layer(x);
//   const auto loss = experts.mean_over_tokens(output.values.sum(), x.size(0)) +
//                     output.losses.weighted({.load_balance = 0.01, .z = 0.001});
//   loss.backward();
//   experts.sum_gradients();
//
// Declares:
// - `MixtureOfExperts`, `MixtureOfExpertsImpl`, `MixtureOfExpertsOptions`, `ExpertActivation`: the
//   layer.
// - `MixtureOfExpertsOutput`, `RouterLosses`, `RouterLossWeights`, `RouterStatistics`: its output:
//   values, losses and numbers of tokens.
// - `held_tensors()`: lists the tensors of an output; wrappers call it.
// - `ExpertParallel`, `ExpertParallelOptions`, `SumGradientsOptions`: divides the experts, and sums
//   gradients.
//
// Guide: docs/guide/parallel/expert-parallel.md. Source: Switch Transformers, GShard.
#pragma once

#include "cadre/parallel/ep/expert_parallel.h"
#include "cadre/parallel/ep/mixture_of_experts.h"
