// Batches of a dataset in a seeded order, divided among the ranks, from any position.
//
//   cadre::DataLoader loader = cadre::make_data_loader(cadre::Mnist("data", cadre::kMnistTrain),
//                                                      {.batch_size = 64, .ranks = world});
//   for (int64_t epoch = 0; epoch < 2; ++epoch) {
//     for (const auto& [images, labels] : loader.epoch(epoch))
//       loss_of(model(images), labels).backward();
//   }
//
// Declares:
// - `DataLoader`, `DataLoaderOptions`, `make_data_loader()`: the loader.
// - `BatchSplit`, `LoaderPosition`: how a batch is divided, and a position from which an epoch can
//   be resumed.
// - `Dataset`, `Batch`: an interface to samples by index, and the samples that a loader returns.
// - `torch_dataset()`: datasets of torch::data, with their transforms.
// - `TokenDataset`, `TokenDatasetOptions`, `TokenFormat`, `write_token_file()`: windows of files of
//   tokens.
// - `TextCorpus`, `TextCorpusOptions`, `TextDataset`, `TextSplit`, `TokenRange`,
//   `split_by_position()`, `kVocabularySize`, `kEndOfText`, `kEndOfTextMark`: the bytes of a text
//   as tokens.
// - `Tokenizer`, `TokenizerTrainingOptions`, `TokenDecodingOptions`: byte-level byte-pair encoding,
//   trained here or read from the files of GPT-2 and Hugging Face.
// - `Sampler`, `EpochOrder`, `KeyedSampler`, `WeightedRandomSampler`,
//   `WeightedRandomSamplerOptions`, `LengthGroupedSampler`, `LengthGroupedSamplerOptions`: the
//   order of an epoch.
// - `DistributedSampler`, `DistributedSamplerOptions`: the samples of a rank, in Python's order.
// - `seeded_permutation()`, `seed_of_epoch()`: the order of an epoch.
// - `Mnist`, `kMnistTrain`, `kMnistTest`: images and labels from MNIST's files.
// - `SampleStream`, `StreamItem`, `Sample`: an interface to samples one after another.
// - `stream_dataset()`, `DatasetStreamOptions`, `map_stream()`, `shuffle_stream()`,
//   `ShuffleOptions`, `interleave_streams()`, `InterleaveOptions`, `WeightedStream`, `StreamEnd`:
//   streams that are made of others.
// - `StreamLoader`, `StreamLoaderOptions`, `Collate`, `stack_samples()`: the loader of streams.
//
// Guide: docs/guide/training/data.md. PyTorch: torch.utils.data.DataLoader, DistributedSampler.
#pragma once

#include "cadre/train/data/batches/batch_split.h"
#include "cadre/train/data/data_loader.h"
#include "cadre/train/data/dataset.h"
#include "cadre/train/data/distributed_sampler.h"
#include "cadre/train/data/mnist.h"
#include "cadre/train/data/samplers/sampler.h"
#include "cadre/train/data/samplers/samplers.h"
#include "cadre/train/data/streams/sample_stream.h"
#include "cadre/train/data/streams/stream_loader.h"
#include "cadre/train/data/text_corpus.h"
#include "cadre/train/data/text_dataset.h"
#include "cadre/train/data/tokenizer/tokenizer.h"
#include "cadre/train/data/tokens/token_dataset.h"
#include "cadre/train/data/torch_dataset.h"
