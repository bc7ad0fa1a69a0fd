// Classifies images into ten classes.
//
// Threads, blocking, errors: as Task.
#pragma once

#include <memory>
#include <optional>

#include "cadre/train/trainer/tasks/task.h"

namespace cadre::train {

class ImageTask : public Task {
 public:
  explicit ImageTask(const Config& config);

  std::shared_ptr<Model> make_model() const override;
  std::shared_ptr<const Dataset> training_data() const override { return training_data_; }
  std::shared_ptr<const Dataset> held_out_data() const override { return held_out_data_; }
  DataIdentity data_identity() const override { return identity_; }
  at::Tensor loss(const at::Tensor& output, const at::Tensor& target) const override;
  bool is_classification() const override { return true; }
  std::optional<double> bigram_entropy() const override { return std::nullopt; }
  std::string sample(const Inference& /*infer*/) const override { return ""; }
  std::string data_text() const override;
  std::string_view item_name() const override { return "samples"; }
  int64_t items_per_sample() const override { return 1; }

 private:
  void open_mnist();
  void make_synthetic();

  Config config_;
  DataIdentity identity_;
  std::shared_ptr<const Dataset> training_data_;
  std::shared_ptr<const Dataset> held_out_data_;
};

}  // namespace cadre::train
