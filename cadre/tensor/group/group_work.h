// Creates Works (handles of asynchronous operations) that add a step to one operation of a
// Communicator, or combine several.
//
// Threads, blocking, lifetime, errors: as Work.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <vector>

#include "cadre/core/comm/queue/work.h"

namespace cadre {

// Returns a work that ends with the operation. The first wait() on it that succeeds calls `finish`
// before it returns. On a device other than the CPU `finish` enqueues on the stream that is current
// in the thread of that wait(), and each later wait() orders its own current stream behind it. The
// stream that is current at this call is ordered behind it when the work is destroyed, because
// memory that `finish` owns returns to that stream.
Work finish_after(Work operation, std::function<void()> finish, c10::Device device);

// Returns a work that ends when all `works` have ended. It fails with the first error in the order
// of the list.
Work all_of(std::vector<Work> works);

}  // namespace cadre
