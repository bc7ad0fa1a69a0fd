#include "cadre/train/data/text_dataset.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"

namespace cadre {

TextDataset::TextDataset(std::shared_ptr<const TextCorpus> corpus, TokenRange range,
                         int64_t context)
    : corpus_(std::move(corpus)), range_(range), context_(context) {
  const int64_t num_tokens = this->corpus().num_tokens();
  if (context < 1 || range.begin < 0 || range.begin > range.end || range.end > num_tokens) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("TextDataset: a context of {} in tokens [{}, {}) of {}; expected a "
                              "context of at least 1, and a range of the text",
                              context, range.begin, range.end, num_tokens));
  }
  num_samples_ = (range.size() - 1) / context;
  if (num_samples_ < 1) {
    throw Error(
        ErrorCode::kInvalidArgument,
        cadre::format("the text has {} tokens; one sample takes {} + 1: provide more text, or "
                      "use a shorter context",
                      range.size(), context));
  }
}

const TextCorpus& TextDataset::corpus() const {
  if (corpus_ == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "TextDataset: it has no text: the corpus is null, or this dataset was moved from");
  }
  return *corpus_;
}

std::optional<uint64_t> TextDataset::digest() const {
  Fnv1a hash;
  hash.add(corpus().fingerprint());
  for (const int64_t part : {range_.begin, range_.end, context_}) {
    hash.add(static_cast<uint64_t>(part));
  }
  return hash.value();
}

Batch TextDataset::get(std::span<const int64_t> indices) const {
  const auto num_rows = static_cast<int64_t>(indices.size());
  // Each row stores its T + 1 tokens once; data and target are views of the row that are shifted by
  // one token.
  const at::Tensor rows = at::empty({num_rows, context_ + 1}, at::kLong);
  auto* first = rows.mutable_data_ptr<int64_t>();
  const auto row_size = static_cast<size_t>(context_ + 1);
  for (const int64_t index : indices) {
    if (index < 0 || index >= num_samples_) {
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("TextDataset: sample {} does not exist; the dataset has {} samples",
                                index, num_samples_));
    }
    corpus().copy_tokens(range_.begin + index * context_, std::span(first, row_size));
    first += row_size;
  }
  return {.data = rows.narrow(1, 0, context_), .target = rows.narrow(1, 1, context_)};
}

}  // namespace cadre
