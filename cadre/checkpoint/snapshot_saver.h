// Saves snapshots while training goes on: a step pays for a copy into staging memory alone.
//
// Threads: one, which is the caller's; the writing happens on a thread of the saver's own.
// Blocking: the constructor of a group (it splits a group off for the saver, whose operations must
// not mix with those of training); save(), until the save before it has ended and the copy is made;
// finish() and close(), until the last save has ended. A save ends for the time of the disk, or
// when ranks have waited for each other for `timeout`. Lifetime: the staging memory, as large as
// what this rank holds, is kept for the next save. The destructor ends the waits for other ranks
// and joins the thread: for the time of the disk. Errors: a save that fails in the background is
// thrown by the next save(), finish() or close(), on all ranks alike and with its step; earlier
// snapshots are as they were (sharded_save.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "cadre/base/error.h"
#include "cadre/base/export.h"
#include "cadre/checkpoint/sharded_save.h"

namespace cadre {

class CADRE_EXPORT SnapshotSaver {
 public:
  // Collective.
  SnapshotSaver(SnapshotFolder folder, const ProcessGroup& group, SaveOptions options = {});
  // Of one process on its own.
  explicit SnapshotSaver(SnapshotFolder folder, SaveOptions options = {});
  ~SnapshotSaver();
  SnapshotSaver(const SnapshotSaver&) = delete;
  SnapshotSaver& operator=(const SnapshotSaver&) = delete;

  // Collective. Copies the parts and returns, while they are written. Throws the failure of the
  // save before, if no call has reported it yet; this one is begun in any case.
  void save(int64_t step, const SnapshotParts& parts);
  // Throws the failure of the last save, if no call has reported it yet.
  void finish();
  // Collective. finish(), then leaves the saver's group. Idempotent.
  void close();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cadre
