// What is trained on what, and how it is judged: all in which a run on text differs from one on
// images.
//
// Threads: one. Blocking: make_task() opens or makes the data. Lifetime: owns the data.
// Errors: cadre::Error for data that is not there or does not fit the model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/base/deadline.h"
#include "cadre/data/dataset.h"
#include "cadre/train/config/config.h"
#include "cadre/train/models/model.h"

namespace cadre::train {

// Two runs that differ in it see different data: a resumed run must see the same.
struct DataIdentity {
  int64_t size = 0;  // of text in tokens, else in samples
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
  // Mean over the batch, in nats. Of an empty batch: 0, with a gradient of zeros.
  virtual at::Tensor loss(const at::Tensor& output, const at::Tensor& target) const = 0;

  // Whether the largest output of a sample names its class, so that an accuracy can be told.
  virtual bool is_classification() const = 0;
  // The loss that the best model of pairs of tokens has on the held-out text.
  virtual std::optional<double> bigram_entropy() const = 0;
  // What the model makes of itself at the end of a run; empty when that is nothing to read.
  virtual std::string sample(const Inference& infer) const = 0;

  // For people: "8000 images of mnist", and what speed is counted in: "tokens", "samples".
  virtual std::string data_text() const = 0;
  virtual std::string_view item_name() const = 0;
  virtual int64_t items_per_sample() const = 0;
};

// REQUIRES: a configuration without conflicts (find_conflict).
std::unique_ptr<Task> make_task(const Config& config, Deadline deadline);

}  // namespace cadre::train
