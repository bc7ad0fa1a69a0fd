// The memory of flat buffers: a pool of buffers that are filled and freed again and again; and a
// storage that has memory only at times, while the tensors over it stay, and that throws a sentence
// of the program's choice when it is touched at another time.
//
// Threads: one at a time. Blocking: never. Lifetime: buffers keep their memory, also after the
// pool; a storage shares what it is given. Errors: libtorch throws c10::Error with the sentence of
// a guard. Source: the storage pools of FSDP implementations, and the storage resizing of
// torch.distributed.fsdp, with a guard in place of a size of 0.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"

namespace cadre::shard {

// Reuses freed buffers, because the first access to new memory costs more than filling the buffer.
// The buffers in use and those that the pool keeps, together, never exceed the peak of the buffers
// in use: peak_bytes().
class CADRE_EXPORT FlatBufferPool {
 public:
  // Returns a contiguous tensor (numel), not initialised.
  at::Tensor take(int64_t numel, at::ScalarType dtype);
  // Takes back a buffer from take(). No operation may still write to it.
  void give_back(const at::Tensor& buffer);
  // Called for a buffer that will not come back: an operation that failed may still write to it.
  void forget(const at::Tensor& buffer);

  int64_t used_bytes() const { return used_bytes_; }
  int64_t kept_bytes() const { return kept_bytes_; }
  // The most bytes that were in use at one time.
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  // Byte tensors, of which the last one returned is the first one reused.
  std::vector<at::Tensor> kept_;
  int64_t used_bytes_ = 0;
  int64_t kept_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

// A flat tensor whose memory is attached and detached; the program's tensors are views of it. At
// first it has no memory. The storage always keeps its size, because libtorch checks each view
// against it.
class CADRE_EXPORT GuardedStorage {
 public:
  // Makes a storage without elements; assign another one to it later.
  GuardedStorage() = default;
  GuardedStorage(int64_t numel, at::ScalarType dtype);

  // The tensor (numel) of which views are taken.
  const at::Tensor& tensor() const { return tensor_; }
  // Gives the storage the memory of buffer, (numel) of the same dtype, which it keeps alive; no
  // memory if buffer is undefined.
  void set_memory(const at::Tensor& buffer);
  // Makes each use of the memory throw the sentence, until clear_guard().
  void guard(const std::string& sentence);
  void clear_guard();

 private:
  at::Tensor tensor_;
};

// Makes writes to a mapped shard throw a sentence that names the updates which may write. Reading
// is allowed, except before libtorch 2.13, which cannot distinguish reads from writes.
CADRE_EXPORT void guard_against_writes(const at::Tensor& shard);
CADRE_EXPORT void clear_write_guard(const at::Tensor& shard);

}  // namespace cadre::shard
