// Model, data, loss and evaluation of a run: everything that differs between text and images.
//
// Threads: one. Blocking: make_task() opens or generates the data. Lifetime: owns the data. Errors:
// cadre::Error for data that is missing or does not suit the model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/core/base/deadline.h"
#include "cadre/train/data/dataset.h"
#include "cadre/train/trainer/config/config.h"
#include "cadre/train/trainer/models/model.h"

namespace cadre::train {

// Identifies the data. A resumed run must have the same data.
struct DataIdentity {
  int64_t size = 0;  // the number of tokens of a text, or of samples
  uint64_t fingerprint = 0;

  friend bool operator==(const DataIdentity&, const DataIdentity&) = default;
};

class Task {
 public:
  virtual ~Task() = default;

  virtual std::shared_ptr<Model> make_model() const = 0;
  virtual std::shared_ptr<const Dataset> training_data() const = 0;
  virtual std::shared_ptr<const Dataset> held_out_data() const = 0;
  virtual DataIdentity data_identity() const = 0;
  // Returns whether all batches so far came from the data that data_identity() describes. A batch
  // that a thread has fetched ahead counts, too.
  virtual bool data_are_unchanged() const { return true; }
  // Throws unless data_are_unchanged(); the message names the file that has changed.
  virtual void check_data() const {}
  // Returns the mean loss over the batch in nats. For an empty batch returns 0, with a gradient of
  // zeros.
  virtual at::Tensor loss(const at::Tensor& output, const at::Tensor& target) const = 0;

  // Returns whether the task is a classification, in which the index of the largest output is the
  // predicted class. If so, an accuracy is reported.
  virtual bool is_classification() const = 0;
  // Returns the bigram conditional entropy of the held-out text (train/data/bigram.h); nullopt for
  // images.
  virtual std::optional<double> bigram_entropy() const = 0;
  // Returns a text that the model generates, for the end of a run; an empty text if it generates
  // none.
  virtual std::string sample(const Inference& infer) const = 0;

  // Return texts for messages: a description of the data, such as "8000 images of mnist", and the
  // unit of the training speed, "tokens" or "samples".
  virtual std::string data_text() const = 0;
  virtual std::string_view item_name() const = 0;
  virtual int64_t items_per_sample() const = 0;
};

// REQUIRES: find_conflict() has found no conflict in the configuration.
std::unique_ptr<Task> make_task(const Config& config, Deadline deadline);
// Make the tasks of images and of text.
std::unique_ptr<Task> make_image_task(const Config& config);
std::unique_ptr<Task> make_text_task(const Config& config, Deadline deadline);

}  // namespace cadre::train
