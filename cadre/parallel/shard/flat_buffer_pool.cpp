#include "cadre/parallel/shard/flat_buffer_pool.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace cadre::shard {

at::Tensor FlatBufferPool::take(int64_t numel, at::ScalarType dtype) {
  const auto num_bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  used_bytes_ += num_bytes;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  const auto same = std::find_if(kept_.rbegin(), kept_.rend(), [num_bytes](const at::Tensor& kept) {
    return kept.numel() == num_bytes;
  });
  if (same != kept_.rend()) {
    at::Tensor found = *same;
    kept_.erase(std::next(same).base());
    kept_bytes_ -= num_bytes;
    return found.view(dtype);
  }
  while (!kept_.empty() && used_bytes_ + kept_bytes_ > peak_bytes_) {
    kept_bytes_ -= kept_.front().numel();
    kept_.erase(kept_.begin());
  }
  return at::empty({num_bytes}, at::kByte).view(dtype);
}

void FlatBufferPool::give_back(const at::Tensor& buffer) {
  forget(buffer);
  kept_.push_back(buffer.view(at::kByte));
  kept_bytes_ += kept_.back().numel();
}

void FlatBufferPool::forget(const at::Tensor& buffer) {
  used_bytes_ -= static_cast<int64_t>(buffer.nbytes());
}

}  // namespace cadre::shard
