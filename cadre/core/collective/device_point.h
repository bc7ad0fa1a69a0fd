// A point in the work of a device: it is reached when the work that was enqueued before it has been
// done. It orders a collective behind the work of its caller, and the caller's next work behind the
// collective. The code below the torch line knows devices by this interface only.
//
// Threads: any. Lifetime: shared; a point may be destroyed before it is reached. Errors: what the
// driver of the device reports.
// Source: CUDA's events: cudaEventRecord() makes a point, cudaStreamWaitEvent() orders behind it.
#pragma once

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre {

class CADRE_EXPORT DevicePoint {
 public:
  DevicePoint() = default;
  virtual ~DevicePoint() = default;

  // Orders the work that the calling thread enqueues from now on behind this point, on the stream
  // of the point's device that is current in this thread. Does not wait on the host.
  virtual Status order_current_stream() const = 0;

 protected:
  DevicePoint(const DevicePoint&) = default;
  DevicePoint& operator=(const DevicePoint&) = default;
};

}  // namespace cadre
