// Saves snapshots in the background: training waits only for a copy to staging memory.
//
// Threads: the caller's; files are written on a thread of the saver. Blocking: the constructor with
// a group, which splits off a group for the saver, so that its operations do not mix with those of
// training; save(), until the previous save has ended and the copy is made; finish() and close(),
// until the last save has ended. A save takes the time of the disk, and ends if ranks have waited
// for each other for `timeout`. Lifetime: the staging memory, as large as this rank's shard, is
// kept for the next save. At the end of a scope the destructor finishes the last save, as finish()
// does. While an exception unwinds the stack, other ranks may not take part in that save: the
// destructor waits for it for a few seconds, then ends the waits of all ranks. In both cases a
// snapshot that is lost, and an error that no call has thrown, are written to standard error at
// level error. Errors: the error of a save in the background is thrown by the next save(), finish()
// or close(), equal on all ranks and with its step; earlier snapshots are unchanged
// (sharded_save.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/train/checkpoint/sharded_save.h"

namespace cadre {

class CADRE_EXPORT SnapshotSaver {
 public:
  // Collective.
  SnapshotSaver(SnapshotFolder folder, const ProcessGroup& group, SaveOptions options = {});
  // Makes a saver for a single process, without a group.
  explicit SnapshotSaver(SnapshotFolder folder, SaveOptions options = {});
  ~SnapshotSaver();
  SnapshotSaver(const SnapshotSaver&) = delete;
  SnapshotSaver& operator=(const SnapshotSaver&) = delete;

  // Collective. Copies the parts, starts to write them in the background, and returns. Throws the
  // error of the previous save if no call has thrown it yet; the new save is started in any case.
  // If one rank cannot copy the parts, this save fails on all ranks.
  void save(int64_t step, const SnapshotParts& parts);
  // Throws the failure of the last save, if no call has thrown it yet.
  void finish();
  // Collective. Calls finish(), then closes the saver's group. If a save has not ended by the
  // timeout, the waits of all ranks for each other end, and the error says so. Idempotent.
  void close(Duration timeout = kDefaultSnapshotTimeout);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cadre
