// The interface of every engine that moves and reduces bytes for a group.
//
// Threads: one call at a time, from whichever thread holds the group's progress role.
// Blocking: a blocking engine runs the collectives inside submit(), each until it is done, the
// call's deadline or the group's Interrupt. A stream-ordered engine only enqueues them.
// Lifetime: the Collectives, and the OpContext with its OpProgress, are borrowed until submit()
// returns; their buffers until the Completion is done.
// Errors: kTimeout and kPeerLost with OpProgress::waiting_for naming the peer; kAborted when the
// Interrupt was raised; kInvalidArgument when a peer called another operation
// (OpProgress::set_mismatch) or the parts of an all_to_all_v do not fit (part_mismatch), then on
// all ranks. After an error the group is unusable; buffers hold anything. Numerics: the order of
// additions is fixed by (op, dtype, count, world size), never by arrival; all ranks end with
// identical bits. bfloat16 is accumulated in float32 and rounded once. Source: the operations are
// c10d's, with one flat buffer a side.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "cadre/base/error.h"
#include "cadre/base/types.h"
#include "cadre/collective/collective.h"
#include "cadre/collective/completion.h"
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
  // Runs the collectives in order. Ends with the first error: the collectives after it are not run.
  // REQUIRES: at least one collective, as many fingerprints as collectives, validate() of each, and
  // that kPremulSum comes as kSum of inputs that are multiplied already.
  virtual Completion submit(const OpContext& op, std::span<const Collective> collectives) = 0;
};

// submit() of a blocking engine whose `run` takes one collective and its context. Status: the first
// error.
template <typename Run>
Status run_in_order(const OpContext& op, std::span<const Collective> collectives, const Run& run) {
  Status status = run(op, collectives.front());
  for (size_t i = 1; i < collectives.size() && status.ok(); ++i) {
    op.progress.set_index(i);
    status = run(op.from(i), collectives[i]);
  }
  return status;
}

}  // namespace cadre
