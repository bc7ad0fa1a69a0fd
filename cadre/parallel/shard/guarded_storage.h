// The storage behind tensors whose memory comes and goes while their sizes stay, and the sentences
// that a program reads when it touches such memory at the wrong time.
//
// Threads: one at a time. Blocking: never. Lifetime: shares what it is given.
// Errors: libtorch throws c10::Error with the sentence of a guard.
// Source: storage resizing of torch.distributed.fsdp, with a guard in place of a size of 0.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "cadre/core/base/export.h"

namespace cadre::shard {

// A flat tensor, of which the program's tensors are views, without memory at first. The storage
// keeps its size all the time, because libtorch checks each view against it.
class CADRE_EXPORT GuardedStorage {
 public:
  // Makes a storage without elements, to which another one is assigned later.
  GuardedStorage() = default;
  GuardedStorage(int64_t numel, at::ScalarType dtype);

  // The tensor (numel) of which views are taken.
  const at::Tensor& tensor() const { return tensor_; }
  // Gives the storage the memory of buffer, (numel) of the same dtype, which it keeps alive; no
  // memory if buffer is undefined.
  void set_memory(const at::Tensor& buffer);
  // Until clear_guard(), touching the memory throws the sentence.
  void guard(const std::string& sentence);
  void clear_guard();

 private:
  at::Tensor tensor_;
};

// Makes writes to a mapped shard throw a sentence that names the updates which may write. Reading
// is allowed, except before libtorch 2.13, which cannot tell it from writing.
CADRE_EXPORT void guard_against_writes(const at::Tensor& shard);
CADRE_EXPORT void clear_write_guard(const at::Tensor& shard);

}  // namespace cadre::shard
