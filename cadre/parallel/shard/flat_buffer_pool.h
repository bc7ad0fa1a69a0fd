// Memory of flat buffers that are filled and freed again and again: a freed buffer is handed out
// again, because the first touch of fresh memory costs more than filling it.
//
// Threads: one at a time. Blocking: never. Lifetime: buffers keep their memory, also after the
// pool. Errors: none. What the pool keeps beyond the buffers in use never makes both together more
// than what was in use at one time: peak_bytes(). Source: the storage pools of FSDP
// implementations.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cadre/core/base/export.h"

namespace cadre::shard {

class CADRE_EXPORT FlatBufferPool {
 public:
  // Returns a contiguous tensor (numel), not initialised.
  at::Tensor take(int64_t numel, at::ScalarType dtype);
  // Takes back a buffer that take() gave and to which nothing writes any more.
  void give_back(const at::Tensor& buffer);
  // Called for a buffer that will not come back: an operation that failed may still write to it.
  void forget(const at::Tensor& buffer);

  int64_t used_bytes() const { return used_bytes_; }
  int64_t kept_bytes() const { return kept_bytes_; }
  // The most bytes that were in use at one time.
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  std::vector<at::Tensor> kept_;  // byte tensors; the last one returned is handed out first
  int64_t used_bytes_ = 0;
  int64_t kept_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

}  // namespace cadre::shard
