// Self-attention whose heads and tokens ranks may divide: tensor and context parallelism.
//
//   cadre::SelfAttention attention(
//       cadre::SelfAttentionOptions{.embed_dim = 512, .num_heads = 8});
//   const cadre::ContextParallel context(world, {.num_tokens = 8192});
//   cadre::set_context_parallel(*attention, context);  // its input is now this rank's tokens
//   const Tensor shard = context.shard(x, 1);          // (B, this rank's tokens, 512)
//   const Tensor output = attention(shard);
//
// Declares:
// - `SelfAttention`, `SelfAttentionImpl`, `SelfAttentionOptions`: multi-head attention, also with
//   fewer heads of keys and values.
// - `ParallelSelfAttention`, `ParallelSelfAttentionImpl`, `ParallelSelfAttentionOptions`: attention
//   that is constructed with its heads already divided.
// - `AttentionOptions`: the mask, the scale and the dropout.
// - `ContextParallel`, `ContextParallelOptions`: which tokens of a sequence each rank has.
// - `ContextForm`, `SequenceOrder`, `to_string()`, `TokenRun`: how ranks exchange keys and values,
//   and which tokens each rank has.
// - `ContextParallelLayer`, `set_context_parallel()`: tells the layers of a module that ranks
//   divide the tokens.
// - `context_parallel_attention()`: attention to the tokens of all ranks, as a function.
//
// Guide: docs/guide/parallel/context-parallel.md. PyTorch:
// torch.distributed.tensor.experimental.context_parallel.
#pragma once

#include "cadre/parallel/layers/attention/attention_options.h"
#include "cadre/parallel/layers/attention/context_parallel_attention.h"
#include "cadre/parallel/layers/attention/self_attention.h"
#include "cadre/parallel/layers/context_parallel.h"
