// Datasets of torch::data, with their transforms, as datasets of a DataLoader.
//
//   auto digits = torch::data::datasets::MNIST("data")
//                     .map(torch::data::transforms::Normalize<>(0.13, 0.31))
//                     .map(torch::data::transforms::Stack<>());
//   auto loader = cadre::make_data_loader(digits, {.batch_size = 64, .ranks = world,
//                                                  .num_threads = 2});
//
// Accepted are datasets with access by index whose batch is an Example of tensors (Stack<> makes
// one) or a vector of them, which are then stacked; also Examples without a target. Other batches
// need a transform that makes an Example. A dataset without random access (StreamDataset,
// ChunkDataset) does not compile: derive a SampleStream instead.
//
// Threads: as torch::data's loader, each thread that fetches uses its own copy of the dataset,
// which it keeps for later batches, because get_batch() is not const. Transforms must not change
// what copies share. A transform with random numbers of the default generator gives other numbers
// with another number of threads or ranks. A dataset that cannot be copied is used by one thread at
// a time. Blocking: as the dataset's get_batch(). Lifetime: owns the dataset and its copies.
// Errors: kInvalidArgument for a dataset of unknown size, and for samples that cannot be stacked;
// what get_batch() throws. Source: torch::data. Guide: docs/guide/training/data.md.
#pragma once

#include <ATen/ops/stack.h>
#include <c10/util/ArrayRef.h>
#include <torch/data/example.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/train/data/data_loader.h"
#include "cadre/train/data/dataset.h"

namespace cadre {
namespace data {

// An Example<Tensor, Tensor>, or one without a target.
template <typename E>
concept TensorExample =
    requires(const E& example) {
      { example.data } -> std::convertible_to<at::Tensor>;
    } &&
    (
        !requires(const E& example) { example.target; } ||
        requires(const E& example) {
          { example.target } -> std::convertible_to<at::Tensor>;
        });

template <typename E>
at::Tensor target_of(const E& example) {
  if constexpr (requires { example.target; }) {
    return example.target;
  } else {
    return {};
  }
}

template <TensorExample E>
Batch batch_of(const E& batch) {
  return {.data = batch.data, .target = target_of(batch)};
}

template <TensorExample E>
Batch batch_of(const std::vector<E>& examples) {
  std::vector<at::Tensor> data;
  std::vector<at::Tensor> targets;
  for (const E& example : examples) {
    data.push_back(example.data);
    if (const at::Tensor target = target_of(example); target.defined()) targets.push_back(target);
  }
  if (examples.empty() || (!targets.empty() && targets.size() != data.size())) {
    throw Error(ErrorCode::kInvalidArgument,
                "torch_dataset: get_batch() returned no examples, or only some with a target; "
                "expected an example for each index");
  }
  return {.data = at::stack(data), .target = targets.empty() ? at::Tensor() : at::stack(targets)};
}

template <typename D>
concept TorchDataset = requires(D dataset, const D& same, c10::ArrayRef<size_t> indices) {
  dataset.get_batch(indices);
  { same.size() } -> std::convertible_to<std::optional<size_t>>;
} && !std::derived_from<D, Dataset>;

template <typename D>
class AdaptedDataset : public Dataset {
 public:
  AdaptedDataset(D dataset, std::optional<uint64_t> digest) : digest_(digest) {
    const std::optional<size_t> size = std::as_const(dataset).size();
    if (!size) {
      throw Error(ErrorCode::kInvalidArgument,
                  "torch_dataset: the size of the dataset is unknown; derive a SampleStream for "
                  "samples without a known number");
    }
    size_ = static_cast<int64_t>(*size);
    idle_.push_back(std::make_unique<D>(std::move(dataset)));
  }

  int64_t size() const override { return size_; }
  std::optional<uint64_t> digest() const override { return digest_; }
  Batch get(std::span<const int64_t> indices) const override {
    if (!indices.empty()) return fetch(indices);
    // Transforms such as Stack<> refuse an empty batch, so a sample gives the shape.
    const int64_t first = 0;
    Batch batch = fetch({&first, 1});
    const auto no_rows = [](const at::Tensor& tensor) {
      return tensor.defined() && tensor.dim() > 0 ? tensor.narrow(0, 0, 0) : tensor;
    };
    return {.data = no_rows(batch.data), .target = no_rows(batch.target)};
  }

 private:
  Batch fetch(std::span<const int64_t> indices) const {
    const std::vector<size_t> requested(indices.begin(), indices.end());
    if constexpr (std::copy_constructible<D>) {
      std::unique_ptr<D> own = take();
      Batch batch = batch_of(own->get_batch(requested));
      const std::lock_guard lock(mutex_);
      idle_.push_back(std::move(own));
      return batch;
    } else {
      const std::lock_guard lock(mutex_);
      return batch_of(idle_.front()->get_batch(requested));
    }
  }

  // Returns a copy that no other thread uses. If get_batch() throws, its copy is not used again;
  // the last one stays, because new copies are made of it.
  std::unique_ptr<D> take() const {
    const std::lock_guard lock(mutex_);
    if (idle_.size() == 1) return std::make_unique<D>(*idle_.front());
    std::unique_ptr<D> taken = std::move(idle_.back());
    idle_.pop_back();
    return taken;
  }

  int64_t size_ = 0;
  std::optional<uint64_t> digest_;
  mutable std::mutex mutex_;  // guards idle_
  mutable std::vector<std::unique_ptr<D>> idle_;
};

}  // namespace data

// Returns the dataset for loaders and streams of Cadre. digest: as Dataset::digest().
template <data::TorchDataset D>
std::shared_ptr<const Dataset> torch_dataset(D dataset, std::optional<uint64_t> digest = {}) {
  static_assert(
      requires(D& d) { data::batch_of(d.get_batch(c10::ArrayRef<size_t>())); },
      "Cadre needs batches of torch::data::Example with tensors: add a transform such as "
      "torch::data::transforms::Stack<>");
  return std::make_shared<const data::AdaptedDataset<D>>(std::move(dataset), digest);
}

template <data::TorchDataset D>
DataLoader make_data_loader(D dataset, const DataLoaderOptions& options) {
  return DataLoader(torch_dataset(std::move(dataset)), options);
}

}  // namespace cadre
