// Tensors whose memory is in a file on disk, so that together they may be larger than the machine's
// memory. beside.h puts related tensors, such as optimizer state, into the same file.
//
// Threads: any. Blocking: for disk accesses. Lifetime: tensors keep the file open. The file
// has no name, so the system removes it when the process ends. Errors: cadre::Error with
// kUnavailable for a missing folder and a full disk; disk space is reserved before memory is handed
// out.
// Source: parameter offload of ZeRO-Infinity, arXiv:2104.07857, with the page cache in place of
// buffers of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "cadre/core/base/export.h"

namespace cadre {

namespace os {
class ScratchArena;
}

class CADRE_EXPORT FileMemory : public std::enable_shared_from_this<FileMemory> {
  struct Key {  // only open() can make a Key
    explicit Key() = default;
  };

 public:
  // `folder` should be on a disk: a file in tmpfs occupies memory.
  static std::shared_ptr<FileMemory> open(const std::string& folder);
  FileMemory(Key, std::shared_ptr<os::ScratchArena> arena) : arena_(std::move(arena)) {}

  // Returns num_bytes rounded up to whole pages, which is what a tensor occupies in the file.
  static int64_t in_pages(int64_t num_bytes);
  // Reserves disk space for tensors that zeros() will create.
  void reserve(int64_t num_bytes);
  // Returns zeros of shape (numel). If numel is 0, no memory is allocated.
  at::Tensor zeros(int64_t numel, at::ScalarType dtype);
  // Returns the bytes that the existing tensors occupy.
  int64_t used_bytes() const { return used_bytes_; }

  // Returns the FileMemory in which the tensor's memory is; null for any other tensor.
  static std::shared_ptr<FileMemory> of(const at::Tensor& tensor);

 private:
  struct Block;
  static void release(void* block);

  std::shared_ptr<os::ScratchArena> arena_;  // the file; shared with the tensors' memory
  std::atomic<int64_t> used_bytes_ = 0;
};

}  // namespace cadre
