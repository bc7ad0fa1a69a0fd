// Saves snapshots in the background: training waits only for a copy to staging memory, and not even
// for that if the tensors are on a device. Then the copies are enqueued on the caller's current
// stream, and the thread of the saver waits for them. What the caller enqueues on that stream later
// does not reach the snapshot; another stream that writes the tensors has to wait for it. A
// collective that fails on a device lets the copies behind it end, with values that nothing has
// written. So a save also waits until the collectives on devices that its group, and
// SaveOptions::groups, had issued before it have ended, and fails with the error of such a group.
//
// Threads: all calls from one thread; the files are written on a thread of the saver. Blocking: the
// constructor with a group is collective, because it splits off a group for the saver, whose
// operations then cannot mix with those of training. save() waits for the end of the previous save
// and for the copy; finish() and close() wait for the end of the last save. A save ends at the
// latest when ranks have waited for each other for `timeout`. Lifetime: the staging memory, as
// large as this rank's shard, is kept for the next save; that of tensors on devices is pinned.
//
// At the end of a scope the destructor finishes the last save, as finish() does. While an exception
// unwinds the stack, other ranks may not take part in that save: the destructor waits for it for a
// few seconds, then ends the waits of all ranks. In both cases a lost snapshot, or an error that no
// call has thrown, is logged at level error. Errors: the error of a save in the background is
// thrown by the next save(), finish() or close(), equal on all ranks and with its step; earlier
// snapshots are unchanged (sharded_save.h).
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
  // Makes a saver for the ranks of a group. Collective.
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
  // Collective. Calls finish(), then closes the saver's group. If the last save has not ended
  // within the timeout, it is aborted on all ranks, and the error says so. Idempotent.
  void close(Duration timeout = kDefaultSnapshotTimeout);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cadre
