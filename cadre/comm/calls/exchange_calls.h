// The calls in which ranks do different things or send each other different data, as Operations:
// reduce, gather and scatter with a root, and all_to_all.
//
// Threads: pure functions. Blocking: never. Lifetime: an Operation borrows its buffers and owns the
// sizes of its parts. Errors: kInvalidArgument, as calls/checks.h.
#pragma once

#include "cadre/base/types.h"
#include "cadre/collective/reduce.h"
#include "cadre/comm/communicator.h"
#include "cadre/comm/queue/operation_queue.h"

namespace cadre {

// Who calls.
struct Caller {
  Rank rank;
  int world_size = 1;
};

Operation reduce_of(ConstBytes in, Bytes out, const ReduceKind& kind, Rank root,
                    const Caller& caller, const CollectiveOptions& options);
Operation gather_of(ConstBytes in, Bytes out, DType dtype, Rank root, const Caller& caller,
                    const CollectiveOptions& options);
Operation scatter_of(ConstBytes in, Bytes out, DType dtype, Rank root, const Caller& caller,
                     const CollectiveOptions& options);
Operation all_to_all_of(ConstBytes in, Bytes out, DType dtype, const Caller& caller,
                        const CollectiveOptions& options);
Operation all_to_all_v_of(ConstBytes in, Bytes out, DType dtype, const SplitCounts& counts,
                          const Caller& caller, const CollectiveOptions& options);

}  // namespace cadre
