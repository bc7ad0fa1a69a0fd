// Symmetric memory: every rank of a group on one host has a piece that the other ranks can use in
// place. all_reduce and similar collectives on it need no copy into a staging area. Elsewhere (TCP,
// world of one) it is private memory with the same interface, and a rank can access only its own
// piece.
//
// Threads: any. Blocking: wait_signal(), until its deadline. Lifetime: as long as the last handle,
// also after the group is gone. Groups that are split off on the host use it in place, too; for
// groups that were connected after rejoin() it is plain memory.
// Errors: cadre::Error. After the first failure of the group, and after rejoin(), all methods
// except local() and shares_memory() throw that failure. local() keeps the bytes that this rank and
// its peers had written before. Later writes of a peer do not change it, even if the peer was
// stopped meanwhile and writes through a pointer that it got earlier. Pointers and views of the
// pieces of peers stay valid, but their content is undefined. If a peer has learned of a failure
// before this rank, calls that concern the peer throw kAborted and name it.
// The ranks use operations or signals to agree on what a peer's piece contains, and when: what was
// written before signal() is seen after wait_signal().
#pragma once

#include <cstdint>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre {

class CADRE_EXPORT SymmetricBuffer {
 public:
  // The number of signals from each rank to each other rank.
  static constexpr uint32_t kNumSignals = 64;

  virtual ~SymmetricBuffer() = default;
  // Returns this rank's piece, which is aligned to 4096 bytes and zero at first.
  virtual Bytes local() const = 0;
  // Returns whether this rank can access the pieces of the other ranks. If not, methods that need
  // them throw kInvalidArgument.
  virtual bool shares_memory() const = 0;
  // Return the piece of a rank, which may be this one.
  virtual ConstBytes peer(Rank rank) const = 0;
  virtual Bytes writable_peer(Rank rank) const = 0;
  // Returns one view of all pieces in rank order, each padded to whole pages of 4096 bytes. The
  // first call makes the view; it is valid as long as the buffer. Throws unless shares_memory().
  // After a failure this rank's part of the view may differ from local().
  virtual Bytes contiguous() = 0;
  // Returns the same view as contiguous(), for a rank that writes to no part of it except its own.
  virtual ConstBytes view() = 0;
  // Sends one signal to a rank, which may be this one. Never blocks.
  virtual void signal(Rank peer, uint32_t slot) = 0;
  // Waits for one signal from that rank that no earlier wait has taken. Throws like an operation of
  // the group: a timeout fails the group, and the error names the rank.
  virtual void wait_signal(Rank from, uint32_t slot, Deadline deadline) = 0;
};

}  // namespace cadre
