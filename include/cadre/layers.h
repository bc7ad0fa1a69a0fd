// Layers whose weights ranks may divide: linear, embedding, layer norm, dropout and cross-entropy.
//
//   auto up =
//       cadre::Linear(512, 2048);  // as torch::nn::Linear, until parallelize_module() divides it
//   auto norm = cadre::LayerNorm(torch::nn::LayerNormOptions({512}));
//   auto stream = std::make_shared<cadre::DropoutStream>();
//   cadre::CounterBasedDropout dropout(
//       cadre::CounterBasedDropoutOptions{.p = 0.1, .layer = 3, .stream = stream});
//   const Tensor hidden = dropout(torch::gelu(up(norm(x))));
//   const auto classes = torch::nn::LinearOptions(2048, 50000);
//   cadre::ColumnParallelLinear head(classes, world);  // each rank has its part of the classes
//   const Tensor loss = cadre::vocab_parallel_cross_entropy(head(hidden), labels, world,
//                                                           {.vocabulary = 50000});
//
// Declares:
// - `TensorParallelLayer`, `ParallelStyle`, `LayerParallelism`, `to_string()`: the interface of a
//   layer that can be divided, and how it is divided.
// - `PlanEntry`, `PlannedModule`, `TensorParallelPlanOptions`: a name pattern with the way in which
//   matching layers are divided, and a module that returns such a plan for its own layers.
// - `DividedParameter`, `DividedParameters`, `make_equal()`: help to write a layer of your own.
// - `Linear`, `LinearImpl`: a linear layer that may be divided.
// - `ColumnParallelLinear`, `ColumnParallelLinearImpl`, `ColumnParallelOptions`: a linear layer
//   that is constructed divided by output features.
// - `RowParallelLinear`, `RowParallelLinearImpl`, `RowParallelOptions`: a linear layer that is
//   constructed divided by input features.
// - `column_parallel_linear()`, `row_parallel_linear()`, `ParallelLinearOptions`: the computations
//   of these two layers as functions.
// - `Embedding`, `EmbeddingImpl`: an embedding that may be divided.
// - `VocabParallelEmbedding`, `VocabParallelEmbeddingImpl`, `VocabParallelOptions`: an embedding
//   that is constructed divided by its vocabulary.
// - `LayerNorm`, `LayerNormImpl`: layer normalization, also of shards of the sequence.
// - `vocab_parallel_cross_entropy()`, `VocabParallelCrossEntropyOptions`, `LossReduction`: the loss
//   of logits whose classes are divided.
// - `CounterBasedDropout`, `CounterBasedDropoutImpl`, `CounterBasedDropoutOptions`: dropout whose
//   mask does not depend on the division.
// - `counter_based_dropout()`, `DropoutStream`, `DropoutRegion`: this dropout as a function, and
//   the numbers that determine its mask.
//
// Guide: docs/guide/parallel/tensor-parallel.md. Source: Megatron-LM; PyTorch:
// torch.distributed.tensor.parallel.
#pragma once

#include "cadre/parallel/layers/counter_based_dropout.h"
#include "cadre/parallel/layers/embedding.h"
#include "cadre/parallel/layers/layer_norm.h"
#include "cadre/parallel/layers/linear.h"
#include "cadre/parallel/layers/parallel_linear.h"
#include "cadre/parallel/layers/tensor_parallel_layer.h"
#include "cadre/parallel/layers/vocab_parallel_cross_entropy.h"
