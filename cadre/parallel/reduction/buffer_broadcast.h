// Gives all ranks the buffers of rank 0 at the start of a forward.
//
// A rank writes only the buffers whose values differ from those of rank 0. Such a write counts as a
// change in place, so that the backward of an earlier forward that has saved the buffer throws
// instead of using the new values. The exception are buffers that libtorch's kernels update without
// changing the version counter, such as the running statistics of BatchNorm: if neither this rank
// nor rank 0 has changed the buffer in place since the last broadcast, only a kernel can have, and
// autograd does not notice such a change in one process either. Without the exception two forwards
// of a BatchNorm before one backward would be refused, although that backward does not read the
// statistics.
//
// Threads: one. Blocking: run() is collective, until the group's deadline. Lifetime: shares the
// buffers. Errors: those of the group.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cadre/tensor/hooks/located_group.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::reduction {

class BufferBroadcast {
 public:
  // `wrapper` is the wrapper's number, which is sent with the buffers. REQUIRES: the buffers are
  // equal on all ranks.
  BufferBroadcast(const std::vector<NamedTensor>& buffers, wrap::LocatedGroup group,
                  uint32_t wrapper);

  // Broadcasts the buffers. Returns whether they were those of this wrapper, and not of another one
  // whose forward rank 0 runs.
  bool run();

 private:
  bool has_moved(size_t buffer) const;

  wrap::LocatedGroup group_;
  uint32_t wrapper_;
  // The header, of shape (1 + buffers) and dtype int64: the wrapper, and for each buffer whether
  // rank 0 has changed it in place since the last broadcast. It is sent before the buffers.
  at::Tensor header_;
  std::vector<NamedTensor> sent_;   // has the header, then the buffers
  std::vector<uint32_t> versions_;  // the versions of the buffers after the last broadcast
};

}  // namespace cadre::reduction
