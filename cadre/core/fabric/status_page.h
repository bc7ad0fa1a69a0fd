// Publishes what each rank of a host does in each of its groups. The state of a group is a cell of
// atomics. The cells are in shared memory, if the rank has any, so that peers can read the last
// activity of a stopped or killed process.
//
// Threads: a cell has one writer at a time; any thread of any process that maps the memory may
// read.
// Blocking: never. Lifetime: a StatusPage keeps its memory alive.
// A reader may see fields of two activities mixed. That is acceptable, since the values only appear
// in messages.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/fabric/plane/group_events.h"
#include "cadre/core/memory/host_memory.h"
#include "cadre/core/os/shared_memory.h"
#include "cadre/core/os/wait_word.h"
#include "cadre/core/wire/control.h"

namespace cadre {

// The last activity of one kind. A group has one cell for its collectives and one for its messages.
struct ActivityCell {
  std::atomic<uint32_t> state{0};  // wire::ActivityState
  std::atomic<uint64_t> number{0};
  std::atomic<uint64_t> call{0};  // the first half of the Fingerprint; `shape` is the second
  std::atomic<uint64_t> shape{0};
  std::atomic<int64_t> since_ns{0};
  ProgressMirror progress;

  void begin(uint64_t op_number, const Fingerprint& fingerprint, TimePoint now);
  void end(bool well, TimePoint now);
  // Resets the cell to "no operation yet".
  void clear();
  void copy(const ActivityCell& other);
  bool is_running() const;
  wire::Activity read(TimePoint now) const;
};

// The cells of a rank for one group.
struct alignas(64) GroupCell {
  std::atomic<GroupKey> group{0};
  ActivityCell collective;
  ActivityCell message;

  // Returns the activity that is shown to peers: a running one before a failed one, and a failed
  // one before one that succeeded; of two in the same state the one that began or ended later.
  wire::Activity read(TimePoint now) const;
};

struct StatusSlot {
  static constexpr size_t kNumCells = 128;

  // Set to 1 once `block` and `message_page` are written, the places of this rank's memory for the
  // group of all ranks. That group has no parent group over which its ranks could exchange them.
  os::WaitWord is_ready;
  Place block;
  Place message_page;
  std::array<GroupCell, kNumCells> cells;

  // Returns null if the rank has no cell for the group.
  const GroupCell* find(GroupKey group) const;
};

class StatusPage {
 public:
  static size_t bytes_for(int num_slots);

  // Makes a view of the memory that begins `offset` bytes after the start of the segment. The
  // segment was zeroed when it was created. Each rank of the host makes its own view.
  StatusPage(std::shared_ptr<os::SharedMemory> segment, size_t offset, int num_slots);
  // Makes a private page with one slot, for a rank that shares no memory.
  StatusPage();

  int num_slots() const { return num_slots_; }
  StatusSlot& slot(int index) const { return slots_[index]; }

 private:
  std::shared_ptr<os::SharedMemory> segment_;
  std::shared_ptr<StatusSlot> own_;  // shared, so that a StatusPage is cheap to copy
  StatusSlot* slots_;
  int num_slots_;
};

// Assigns the cells of this process's slot to its groups.
//
// Threads: any. Blocking: never. A released cell keeps its content until it is reused, and the cell
// that was released first is reused first (FIFO). So peers that look for the cause of a failure can
// still read the last activity of this rank in a group that it has closed.
class StatusCells {
 public:
  StatusCells(StatusPage page, int own_slot);

  // Assigns a cell to the group until the result is destroyed. If all cells are in use, the result
  // is a private cell, which peers cannot read. running_besides() reports the group as `name`.
  std::shared_ptr<GroupCell> take(GroupKey group, const std::string& name);
  // While the result lives, running_besides() reports `call`: a call outside of the groups, such as
  // that of a store, in which this process waits.
  std::shared_ptr<const std::string> show_wait(std::string call);
  // Returns what this process runs in another group than this, for example 'all_reduce #7 of group
  // "tp"', or else the call of show_wait() in which it waits. If there is neither, returns an
  // operation of another group that has failed, with the words "which has failed", because the
  // program may have continued since. Returns an empty text if there is none of these.
  std::string running_besides(GroupKey group, TimePoint now) const;

 private:
  struct Table {
    std::mutex mutex;
    std::deque<size_t> free;
    std::map<const GroupCell*, std::string> names;  // the names of the groups that have a cell
    std::vector<std::weak_ptr<const std::string>> waits;
  };
  const StatusPage page_;
  StatusSlot& slot_;
  // Shared with the cells that are assigned.
  const std::shared_ptr<Table> table_ = std::make_shared<Table>();
};

}  // namespace cadre
