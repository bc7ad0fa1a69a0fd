// Provides the memory of flat buffers: a pool that reuses freed buffers, and a storage whose memory
// is attached and detached while tensors are views of it. While no memory is attached, an access to
// such a tensor throws an error with a text that the caller has set.
//
// Threads: one at a time. Lifetime: buffers stay valid after the destruction of the pool; a storage
// keeps the buffer that is attached to it alive. Errors: an access to a guarded storage throws
// c10::Error. Source: the storage pools of FSDP implementations, and the storage resizing of
// torch.distributed.fsdp, with an error on access in place of a size of 0.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/collective/completion.h"

namespace cadre::shard {

// Reuses freed buffers, because the first access to new memory costs more than filling the buffer.
// A buffer on a device is used again only behind the work that was enqueued before it was given
// back, whatever the streams are.
// The buffers in use and those that the pool keeps, together, never exceed the peak of the buffers
// in use: peak_bytes().
class CADRE_EXPORT FlatBufferPool {
 public:
  // Returns a contiguous tensor (numel), not initialised.
  at::Tensor take(int64_t numel, at::ScalarType dtype,
                  c10::Device device = c10::Device(c10::DeviceType::CPU));
  // Returns a buffer of take() to the pool. No operation in flight may still write to it, unless
  // the current stream of the buffer's device is ordered behind it.
  void give_back(const at::Tensor& buffer);
  // Removes a buffer of take() from the count of bytes in use, without reusing it. Called if a
  // failed operation may still write to the buffer.
  void forget(const at::Tensor& buffer);

  int64_t used_bytes() const { return used_bytes_; }
  int64_t kept_bytes() const { return kept_bytes_; }
  // The most bytes that were in use at one time.
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  struct Kept {
    at::Tensor bytes;
    std::shared_ptr<const DevicePoint> last_use;  // null for the CPU
  };

  // The returned buffers. The one that was returned last is reused first.
  std::vector<Kept> kept_;
  int64_t used_bytes_ = 0;
  int64_t kept_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

// A flat tensor whose memory is attached and detached; the program's tensors are views of it. At
// first it has no memory. The storage reports its full size also without memory, because libtorch
// compares the extent of each view with that size.
class CADRE_EXPORT GuardedStorage {
 public:
  // Makes a storage without elements; assign another one to it later.
  GuardedStorage() = default;
  GuardedStorage(int64_t numel, at::ScalarType dtype, c10::Device device);

  // Returns the flat tensor (numel), of which the caller makes views.
  const at::Tensor& tensor() const { return tensor_; }
  // Attaches the memory of `buffer`, (numel) of the same dtype, and keeps it alive. If `buffer` is
  // undefined, detaches the memory.
  void set_memory(const at::Tensor& buffer);
  // Makes each access to the memory throw c10::Error with this text, until clear_guard().
  void guard(const std::string& sentence);
  void clear_guard();

 private:
  at::Tensor tensor_;
};

// Makes each write to a mapped shard throw an error that says how a program may write it: with
// ShardedOptimizer or ShardUpdate. Reading is allowed, except before libtorch 2.13, which cannot
// distinguish reads from writes.
CADRE_EXPORT void guard_against_writes(const at::Tensor& shard);
CADRE_EXPORT void clear_write_guard(const at::Tensor& shard);

}  // namespace cadre::shard
