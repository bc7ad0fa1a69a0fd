// Tensors whose memory lies in a file on disk, so that they may be larger than the machine's
// memory together; and memory for what belongs to such a tensor, as its gradient or the state that
// an optimizer keeps for it, at the same place.
//
// Threads: any. Blocking: for the time of the disk. Lifetime: tensors keep the file, which has no
// name and goes with the process. Errors: cadre::Error, kUnavailable, for a missing folder and a
// full disk; disk space is reserved before memory is handed out.
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
  struct Key {  // only open() can make one
    explicit Key() = default;
  };

 public:
  // folder: on a disk; one in memory (tmpfs) saves none.
  static std::shared_ptr<FileMemory> open(const std::string& folder);
  FileMemory(Key, std::shared_ptr<os::ScratchArena> arena) : arena_(std::move(arena)) {}

  // The bytes that a tensor of num_bytes occupies: whole pages.
  static int64_t in_pages(int64_t num_bytes);
  // Reserves disk space for the tensors that follow.
  void reserve(int64_t num_bytes);
  // (numel), zeroed. No memory where there is no element.
  at::Tensor zeros(int64_t numel, at::ScalarType dtype);
  // The bytes that the existing tensors occupy.
  int64_t used_bytes() const { return used_bytes_; }

  // The one in which a tensor lies; null for any other tensor.
  static std::shared_ptr<FileMemory> of(const at::Tensor& tensor);

 private:
  struct Block;
  static void release(void* block);

  std::shared_ptr<os::ScratchArena> arena_;  // shared by the blocks
  std::atomic<int64_t> used_bytes_ = 0;
};

// As at::zeros_like(tensor), in the file where the tensor lies in one.
CADRE_EXPORT at::Tensor zeros_beside(const at::Tensor& tensor);
// The tensor itself if it lies where `place` does, or `place` in no file; else a copy there.
CADRE_EXPORT at::Tensor moved_beside(const at::Tensor& place, const at::Tensor& tensor);

}  // namespace cadre
