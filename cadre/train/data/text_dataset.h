// Samples for next-token prediction, from a range of a corpus.
//
// Threads, blocking, errors: as TextCorpus. Throws kInvalidArgument for a null corpus, for a
// context below 1, for a range that is not within the corpus or too short for one sample, and for
// an index out of range. Lifetime: shares the corpus.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "cadre/core/base/export.h"
#include "cadre/train/data/dataset.h"
#include "cadre/train/data/text_corpus.h"

namespace cadre {

// Sample i has the tokens [i*T, i*T + T + 1) of the range: its data are the first T of them, its
// target the last T. So each token is predicted once per epoch. data, target: (B, T) int64.
class CADRE_EXPORT TextDataset : public Dataset {
 public:
  TextDataset(std::shared_ptr<const TextCorpus> corpus, TokenRange range, int64_t context);

  int64_t size() const override { return num_samples_; }
  Batch get(std::span<const int64_t> indices) const override;
  std::optional<uint64_t> digest() const override;

 private:
  const TextCorpus& corpus() const;  // throws if there is no corpus

  std::shared_ptr<const TextCorpus> corpus_;
  TokenRange range_;
  int64_t context_;
  int64_t num_samples_;
};

}  // namespace cadre
