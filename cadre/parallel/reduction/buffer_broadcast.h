// Broadcasts the buffers of rank 0 to all ranks at the start of a forward.
//
// A rank writes only the buffers whose values differ from those of rank 0. Such a write counts as a
// change in place: if the backward of an earlier forward has saved the buffer, it throws instead of
// using the new values. There is one exception: buffers that libtorch's kernels update without
// changing the version counter, such as the running statistics of BatchNorm. If neither this rank
// nor rank 0 has changed the buffer in place since the last broadcast, only a kernel can have
// changed it, and autograd ignores such a change in one process, too. Without the exception two
// forwards of a BatchNorm before one backward would be an error, although that backward does not
// read the statistics.
//
// Blocking: run() is collective, until the group's deadline. Lifetime: shares the buffers. Errors:
// those of the group.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cadre/tensor/hooks/located_group.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::reduction {

class BufferBroadcast {
 public:
  // `wrapper` is the number of this wrapper, which is sent with the buffers. REQUIRES: the buffers
  // are equal on all ranks.
  BufferBroadcast(const std::vector<NamedTensor>& buffers, wrap::LocatedGroup group,
                  uint32_t wrapper);

  // Broadcasts the buffers. Returns false if rank 0 runs a forward of another wrapper, so that this
  // rank received that wrapper's buffers.
  bool run();

 private:
  bool has_moved(size_t buffer) const;

  wrap::LocatedGroup group_;
  uint32_t wrapper_;
  // The header, which is sent before the buffers. Shape (1 + number of buffers), dtype int64: the
  // number of the wrapper, and for each buffer whether rank 0 has changed it in place since the
  // last broadcast.
  at::Tensor header_;
  std::vector<NamedTensor> sent_;   // the header, then the buffers
  std::vector<uint32_t> versions_;  // the versions of the buffers after the last broadcast
};

}  // namespace cadre::reduction
