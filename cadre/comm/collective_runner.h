// Runs the collectives of a group on its engine, and turns whatever goes wrong into the group's one
// failure, with the rank at fault.
//
// Threads: run() from the holder of the progress role; the rest from any. Blocking: run(), until
// the operation's deadline and the questions that follow a failure (Monitor::kAskTime,
// kDoubtTime). Lifetime: borrows its parts. Errors: the group's failure.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/collective/backend.h"
#include "cadre/comm/flight_recorder.h"
#include "cadre/comm/monitor.h"
#include "cadre/comm/queue/operation_queue.h"
#include "cadre/comm/symmetric_heap.h"
#include "cadre/os/system.h"

namespace cadre {

class CollectiveRunner final : public OperationRunner {
 public:
  struct Parts {
    os::System& system;
    Monitor& monitor;
    FlightRecorder& recorder;
    Backend* backend = nullptr;  // null for a world of one, whose operations are copies
    SymmetricHeap* heap;         // of allocations
    Duration timeout;            // of operations without a deadline
  };
  explicit CollectiveRunner(const Parts& parts) : parts_(parts) {}

  Status run(Operation& operation) override;
  Duration time_spent() const { return Duration(time_spent_ns_.load(std::memory_order_relaxed)); }

 private:
  // What the engine throws, too, is the failure of the group.
  Status execute_caught(Operation& operation, const OpContext& context);
  Status execute(const Collective& collective, const OpContext& context);
  Collective premultiplied(const Collective& collective);
  Status allocate(Operation& operation, const OpContext& context);
  // Makes the failure of the group out of what the engine reported.
  Error explain(const OpContext& context, const Error& error);
  Error explain_timeout(const OpContext& context);
  Error explain_loss(const OpContext& context, const Error& error);
  Error explain_mismatch(const OpContext& context);
  Error explain_part_mismatch(const OpContext& context);
  Error fail(const OpContext& context, Failure failure);

  Parts parts_;
  TimePoint began_;                // of the running operation
  std::vector<std::byte> scaled_;  // the input of a PREMUL_SUM whose output is smaller
  std::atomic<int64_t> time_spent_ns_{0};
};

}  // namespace cadre
