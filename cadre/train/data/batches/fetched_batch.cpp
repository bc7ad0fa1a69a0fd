#include "cadre/train/data/batches/fetched_batch.h"

#include "cadre/core/base/format.h"
#include "cadre/tensor/device/pinned_tensor.h"

namespace cadre {
namespace {

constexpr int kMaxFetchThreads = 256;

}  // namespace

Batch checked_batch(std::string_view source, Batch batch, size_t num_samples) {
  const auto has_rows = [&](const at::Tensor& tensor) {
    return tensor.dim() > 0 && tensor.size(0) == static_cast<int64_t>(num_samples);
  };
  if (!batch.data.defined()) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("{} returned a batch without data", source));
  }
  for (const at::Tensor& tensor : {batch.data, batch.target}) {
    if (!tensor.defined() || has_rows(tensor)) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        cadre::format("{} was asked for {} samples and returned a tensor of {} dimensions "
                      "with {} rows; expected a row for each sample",
                      source, num_samples, tensor.dim(), tensor.dim() > 0 ? tensor.size(0) : 0));
  }
  return batch;
}

Batch placed_batch(Batch batch, bool is_pinned) {
  if (!is_pinned) return batch;
  return {.data = device::pinned_copy(batch.data), .target = device::pinned_copy(batch.target)};
}

void check_fetch_threads(std::string_view loader, int num_threads, int64_t prefetch) {
  if (num_threads < 0 || num_threads > kMaxFetchThreads || prefetch < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("{}: num_threads is {} and prefetch {}; expected 0 to {} threads, "
                              "and a prefetch of at least 1 batch",
                              loader, num_threads, prefetch, kMaxFetchThreads));
  }
}

}  // namespace cadre
