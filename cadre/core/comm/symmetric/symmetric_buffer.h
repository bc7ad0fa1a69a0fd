// Memory of which every rank of a host group holds a piece that the others can use in place:
// all_reduce and friends on it need no copy into a staging area. Elsewhere (TCP, world of one)
// plain memory with the same interface, of which a rank reaches its own piece alone.
//
// Threads: any. Blocking: wait_signal(), until its deadline. Lifetime: as long as the last handle,
// also after the group is gone. Groups split off on the host use it in place, too; for groups that
// were connected after rejoin() it is plain memory.
// Errors: cadre::Error. After the first failure of the group, rejoin() included, all methods but
// local() and shares_memory() throw that failure. local() keeps what this rank and its peers had
// written to it before, and nothing that a peer writes later shows in it, even if the peer was
// stopped meanwhile and writes through a pointer that it had before. Pointers and views of the
// pieces of peers stay valid, but their content is undefined. Before this rank has learned of a
// failure, calls that concern a rank which has throw kAborted and name that rank.
// What a peer's piece holds, and when, is agreed by operations or by signals: what was written
// before signal() is seen after wait_signal().
#pragma once

#include <cstdint>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre {

class CADRE_EXPORT SymmetricBuffer {
 public:
  static constexpr uint32_t kNumSignals = 64;  // slots between each two ranks

  virtual ~SymmetricBuffer() = default;
  // This rank's piece, aligned to 4096 bytes, zeroed at first.
  virtual Bytes local() const = 0;
  // Whether the pieces of the other ranks are within reach; else what needs them throws
  // kInvalidArgument.
  virtual bool shares_memory() const = 0;
  // The piece of a rank, which may be this one.
  virtual ConstBytes peer(Rank rank) const = 0;
  virtual Bytes writable_peer(Rank rank) const = 0;
  // One view of all pieces in rank order, each padded to whole pages of 4096 bytes. Made by the
  // first call; valid as long as the buffer. REQUIRES: shares_memory(), or it throws. After a
  // failure this rank's part of the view may differ from local().
  virtual Bytes contiguous() = 0;
  // The same view for a rank that writes at most to its own part of it.
  virtual ConstBytes view() = 0;
  // Counts a signal to a rank, which may be this one. Never blocks.
  virtual void signal(Rank peer, uint32_t slot) = 0;
  // Waits for one signal from that rank that no earlier wait has taken. Throws as an operation of
  // the group does: a timeout is the group's failure and names the rank.
  virtual void wait_signal(Rank from, uint32_t slot, Deadline deadline) = 0;
};

}  // namespace cadre
