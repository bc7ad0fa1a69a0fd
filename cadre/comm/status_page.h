// What each rank is doing, as cells of atomics: in memory that the ranks of a host share, so that
// the last activity of a stopped or killed process can be told exactly; else private.
//
// Threads: a cell has one writer at a time; any thread of any mapping process reads.
// Blocking: never. Lifetime: a StatusPage keeps its memory alive.
// A reader may see the fields of two activities mixed; they are only ever shown to people.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/base/deadline.h"
#include "cadre/base/types.h"
#include "cadre/collective/op.h"
#include "cadre/os/shared_memory.h"
#include "cadre/wire/control.h"

namespace cadre {

// The last activity of one kind; collectives and messages have a cell each.
struct ActivityCell {
  std::atomic<uint32_t> state{0};  // wire::ActivityState
  std::atomic<uint64_t> number{0};
  std::atomic<uint64_t> call{0};  // of the Fingerprint, as the next
  std::atomic<uint64_t> shape{0};
  std::atomic<int64_t> since_ns{0};
  ProgressMirror progress;

  void begin(uint64_t op_number, const Fingerprint& fingerprint, TimePoint now);
  void end(bool well, TimePoint now);
  bool is_running() const;
  wire::Activity read(TimePoint now) const;
};

struct alignas(256) StatusSlot {
  std::atomic<uint64_t> stamp{0};          // the rank's probe number: it mapped this page
  std::atomic<uint64_t> pid_namespace{0};  // os::ProcessWatcher's, or 0
  ActivityCell collective;
  ActivityCell message;

  // The one that runs; of two, or of none, the later.
  wire::Activity read(TimePoint now) const;
};

class StatusPage {
 public:
  static size_t bytes_for(int num_slots);

  // In a segment that was zeroed at creation; every rank of the host makes its own view.
  StatusPage(std::shared_ptr<os::SharedMemory> segment, int num_slots);
  // Private, for a rank that shares no memory: one slot.
  StatusPage();

  int num_slots() const { return num_slots_; }
  // REQUIRES: in a segment.
  const os::SharedMemory& segment() const { return *segment_; }
  StatusSlot& slot(int index) const { return slots_[index]; }

 private:
  std::shared_ptr<os::SharedMemory> segment_;
  std::shared_ptr<StatusSlot> own_;  // shared only so that a StatusPage stays a cheap value
  StatusSlot* slots_;
  int num_slots_;
};

}  // namespace cadre
