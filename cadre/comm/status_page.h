// What each rank of a host is doing in each of its groups, as cells of atomics: in memory that the
// ranks share, so that the last activity of a stopped or killed process can be read exactly; else
// private.
//
// Threads: a cell has one writer at a time; any thread of any mapping process reads.
// Blocking: never. Lifetime: a StatusPage keeps its memory alive.
// A reader may see the fields of two activities mixed; they are only ever shown to people.
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

#include "cadre/base/deadline.h"
#include "cadre/base/types.h"
#include "cadre/collective/op.h"
#include "cadre/comm/fabric/group_events.h"
#include "cadre/memory/host_memory.h"
#include "cadre/os/shared_memory.h"
#include "cadre/os/wait_word.h"
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
  // Nothing yet.
  void clear();
  void copy(const ActivityCell& other);
  bool is_running() const;
  wire::Activity read(TimePoint now) const;
};

// What a rank does in one group.
struct alignas(64) GroupCell {
  std::atomic<GroupKey> group{0};
  ActivityCell collective;
  ActivityCell message;

  // The one that runs, else one that failed, else one that succeeded; of two alike the later.
  wire::Activity read(TimePoint now) const;
};

struct StatusSlot {
  static constexpr size_t kNumCells = 128;

  // Published as 1 when the two places are final: those of this rank in the group of all ranks,
  // which has no parent to exchange them over.
  os::WaitWord is_ready;
  Place block;
  Place message_page;
  std::array<GroupCell, kNumCells> cells;

  // Null when the rank has shown nothing of the group here.
  const GroupCell* find(GroupKey group) const;
};

class StatusPage {
 public:
  static size_t bytes_for(int num_slots);

  // In memory that was zeroed at creation, `offset` bytes into the segment; every rank of the host
  // makes its own view.
  StatusPage(std::shared_ptr<os::SharedMemory> segment, size_t offset, int num_slots);
  // Private, for a rank that shares no memory: one slot.
  StatusPage();

  int num_slots() const { return num_slots_; }
  StatusSlot& slot(int index) const { return slots_[index]; }

 private:
  std::shared_ptr<os::SharedMemory> segment_;
  std::shared_ptr<StatusSlot> own_;  // shared only so that a StatusPage stays a cheap value
  StatusSlot* slots_;
  int num_slots_;
};

// The cells of this process's slot, given to its groups.
//
// Threads: any. Blocking: never. A cell that was given back keeps its content until it is given out
// again, the one that was given back first before the others: peers that look for the cause of a
// failure still find what this rank did last in a group that it has closed.
class StatusCells {
 public:
  StatusCells(StatusPage page, int own_slot);

  // A cell that is the group's until the result is destroyed. When all are taken, one that peers
  // cannot see. `name` is for running_besides().
  std::shared_ptr<GroupCell> take(GroupKey group, const std::string& name);
  // While the result lives, running_besides() says that this process waits in `call`, which belongs
  // to no group.
  std::shared_ptr<const std::string> show_wait(std::string call);
  // What this process runs in another group, as 'all_reduce #7 of group "tp"', or what it waits in
  // outside of groups; empty for nothing.
  std::string running_besides(GroupKey group, TimePoint now) const;

 private:
  struct Table {
    std::mutex mutex;
    std::deque<size_t> free;
    std::map<const GroupCell*, std::string> names;  // of the groups whose cells are in use
    std::vector<std::weak_ptr<const std::string>> waits;
  };
  const StatusPage page_;
  StatusSlot& slot_;
  const std::shared_ptr<Table> table_ = std::make_shared<Table>();  // shared with the cells in use
};

}  // namespace cadre
