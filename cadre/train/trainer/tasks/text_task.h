// Predicts the next token of a text.
//
// Threads, blocking, errors: as Task.
#pragma once

#include <memory>
#include <optional>

#include "cadre/train/data/text_corpus.h"
#include "cadre/train/data/text_dataset.h"
#include "cadre/train/trainer/tasks/task.h"

namespace cadre::train {

class TextTask : public Task {
 public:
  TextTask(const Config& config, Deadline deadline);

  std::shared_ptr<Model> make_model() const override;
  std::shared_ptr<const Dataset> training_data() const override { return training_data_; }
  // Returns the first run.evaluate_tokens tokens of the held-out text.
  std::shared_ptr<const Dataset> held_out_data() const override { return held_out_data_; }
  DataIdentity data_identity() const override;
  bool data_are_unchanged() const override { return corpus_->is_unchanged(); }
  void check_data() const override { corpus_->check_unchanged(); }
  at::Tensor loss(const at::Tensor& output, const at::Tensor& target) const override;
  bool is_classification() const override { return false; }
  // Counted on exactly the tokens of held_out_data().
  std::optional<double> bigram_entropy() const override { return bigram_entropy_; }
  std::string sample(const Inference& infer) const override;
  std::string data_text() const override;
  std::string_view item_name() const override { return "tokens"; }
  int64_t items_per_sample() const override { return config_.model.context; }

 private:
  Config config_;
  std::shared_ptr<const TextCorpus> corpus_;
  TextSplit split_;
  std::shared_ptr<const TextDataset> training_data_;
  std::shared_ptr<const TextDataset> held_out_data_;
  double bigram_entropy_ = 0;
};

}  // namespace cadre::train
