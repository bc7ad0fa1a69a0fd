// The interface of every engine that moves and reduces bytes for a group.
//
// Threads: one operation at a time, from whichever thread holds the group's progress role.
// Blocking: every operation, until done, its deadline or the group's Interrupt.
// Lifetime: the buffers of a Collective are borrowed until the call returns.
// Errors: kTimeout and kPeerLost with OpProgress::waiting_for naming the peer; kAborted when the
// Interrupt was raised; kInvalidArgument when a peer called another operation
// (OpProgress::set_mismatch) or the parts of an all_to_all_v do not fit (part_mismatch), then on
// all ranks. After an error the group is unusable; buffers hold anything. Numerics: the order of
// additions is fixed by (op, dtype, count, world size), never by arrival; all ranks end with
// identical bits. bfloat16 is accumulated in float32 and rounded once. Source: the operations are
// c10d's, with one flat buffer a side.
#pragma once

#include <string>
#include <string_view>

#include "cadre/base/error.h"
#include "cadre/base/types.h"
#include "cadre/collective/collective.h"
#include "cadre/collective/op.h"

namespace cadre {

// What a backend can do, to be asked before use; nothing throws "not supported" half-way.
struct Capabilities {
  std::string_view name;       // "host" or "net"
  bool shares_memory = false;  // reads peers' symmetric buffers in place
  std::string algorithms;      // by size, for the log's first line
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual Capabilities capabilities() const = 0;
  // REQUIRES: validate(), and that kPremulSum comes as kSum of inputs that are multiplied already.
  virtual Status run(const OpContext& op, const Collective& collective) = 0;
};

}  // namespace cadre
