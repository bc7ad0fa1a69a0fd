// The loss on text that was never trained on, beside the mark to beat.
//
// Threads: one. Blocking: evaluate() is collective. Lifetime: shares the corpus. Errors: as
// TextDataset, cadre::Error of the group.
#pragma once

#include <memory>

#include "cadre/buckets/replica_group.h"
#include "cadre/data/text_corpus.h"
#include "cadre/data/text_dataset.h"
#include "cadre/train/models/language_model.h"

namespace cadre::train {

class HeldOut {
 public:
  // The first `num_tokens` of `range`, cut into samples of `context` tokens.
  HeldOut(std::shared_ptr<const TextCorpus> corpus, const TokenRange& range, int64_t context,
          int64_t num_tokens);

  // Mean loss in nats over every token of the text, each rank computing its share of the samples.
  // Restores the model's training mode.
  double evaluate(LanguageModel& model, ReplicaGroup& replicas) const;

  // Of the very same text: what the best model that sees one token reaches on it.
  double bigram_entropy() const { return bigram_entropy_; }

 private:
  TextDataset dataset_;
  double bigram_entropy_;
};

}  // namespace cadre::train
