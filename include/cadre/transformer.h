// Layers of a transformer, which ranks may divide in every way: embeddings, blocks of attention and
// MLP, and a head.
//
//   const cadre::TransformerOptions options{.vocabulary = 50257,
//                                           .context = 1024,
//                                           .embed_dim = 768,
//                                           .num_heads = 12,
//                                           .num_blocks = 12};
//   const cadre::TransformerEmbedding embedding(options);
//   torch::nn::Sequential gpt(embedding);
//   for (int i = 0; i < options.num_blocks; ++i) {
//     gpt->push_back(cadre::TransformerBlock(options));
//   }
//   gpt->push_back(cadre::TransformerHead(embedding));  // tied to the embedding
//
// Declares:
// - `TransformerOptions`: the sizes of a model, an argument of each of its layers.
// - `TransformerEmbedding`, `TransformerEmbeddingImpl`: the sum of the embeddings of tokens and
//   positions.
// - `TransformerBlock`, `TransformerBlockImpl`: attention and MLP, each applied after a norm.
// - `TransformerHead`, `TransformerHeadImpl`: a norm, and a linear layer that is tied to the
//   embedding or has a weight of its own.
//
// Guide: docs/guide/parallel/tensor-parallel.md. PyTorch: torch.nn.TransformerEncoderLayer with
// norm_first=True and a causal mask.
#pragma once

#include "cadre/parallel/layers/transformer/transformer.h"
