// From a call's descriptor, buffers and options to the Operation that is queued.
//
// Threads: pure functions. Blocking: never. Lifetime: an Operation borrows its buffers.
// Errors: kInvalidArgument when PREMUL_SUM and a factor do not come together, or for sizes of
// another number of elements than the buffers have.
#pragma once

#include "cadre/base/types.h"
#include "cadre/collective/op.h"
#include "cadre/comm/communicator.h"
#include "cadre/comm/queue/operation_queue.h"

namespace cadre {

// A factor and the operation that needs it come together or not at all.
void check_factor(const OpDescriptor& descriptor, const CollectiveOptions& options);

Operation make_operation(const OpDescriptor& descriptor, ConstBytes in, Bytes out,
                         const CollectiveOptions& options);

}  // namespace cadre
