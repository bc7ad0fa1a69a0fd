// The properties of an operation: its number, its descriptor packed into a fingerprint, its
// deadline.
//
// Threads: OpDescriptor is a plain value; an OpProgress is written by the thread that runs the
// operation and read by any. Blocking: never.
// The first message of each operation contains the fingerprint. It is the packed descriptor, not a
// hash (except for shapes that are too long): so a mismatch is found at once and both sides can
// name what the other called.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/fingerprint.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/packed_shape.h"
#include "cadre/core/os/interrupt.h"

namespace cadre {

struct OpDescriptor {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUint8;
  ReduceOp reduce_op = ReduceOp::kSum;
  Rank root = 0;           // is used by broadcast, reduce, gather and scatter
  uint64_t count = 0;      // elements of one rank's input (reduce_scatter and scatter: of its
                           // output); 0 for all_to_all_v, where counts may differ between ranks
  PackedShape shape = {};  // the shape of the tensor that has these elements
  // The number of collectives in the call that this one is part of; 0 for a call of one collective,
  // and for kinds that have a root.
  uint16_t num_coalesced = 0;
  // Whether the engine for memory of the rank's device runs it (engine_set.h).
  bool on_device = false;

  bool has_root() const;
  // Returns the bits that docs/formats/net-messages.md defines. In groups of up to 65,536 ranks two
  // different operations have different bits.
  Fingerprint fingerprint() const;
  CADRE_EXPORT static OpDescriptor from_fingerprint(const Fingerprint& fingerprint);
  // Returns "all_reduce(sum, float32 x 1024)", "reduce(sum, float32 x [2, 3], root 0)",
  // "all_to_all_v(int64)", "barrier()", "all_gather(float32 x 4, one of 3 in a call)",
  // "all_reduce(sum, float32 x 4, on the device)".
  std::string to_string() const;
};

// Returns "all_reduce #1042".
std::string describe_operation(uint64_t number, const Fingerprint& fingerprint);

// A copy of an OpProgress in memory that peers map, so that they can read it even if the writer was
// stopped or killed. A reader may see the halves of two different phases, so it is only shown to
// people.
struct ProgressMirror {
  std::array<std::atomic<uint64_t>, 2> phase{};  // 16 characters, padded with zeros
  std::atomic<int32_t> waiting_for{-1};
};

// The state of an operation, for diagnosis. Phases are short nouns: "enter", "reduce", "copy out".
class OpProgress {
 public:
  OpProgress() = default;
  // REQUIRES: the mirror outlives this object.
  explicit OpProgress(ProgressMirror* mirror) : mirror_(mirror) {
    set_phase("enter");
    set_waiting_for(-1);
  }

  void set_phase(const char* static_text) {
    phase_.store(static_text, std::memory_order_relaxed);
    if (mirror_ != nullptr) copy_phase(static_text);
  }
  // An Observer is notified when the second and each later collective of a call begins.
  class Observer {
   public:
    virtual void on_next(size_t index) = 0;

   protected:
    ~Observer() = default;  // observers are not destroyed through this type
  };
  // REQUIRES: the observer outlives this object.
  void observe_with(Observer* observer) { observer_ = observer; }

  // Sets which collective of the call is running, from 0. A blocking engine calls it when the
  // previous collective has succeeded.
  void set_index(size_t index) {
    index_.store(index, std::memory_order_relaxed);
    if (observer_ != nullptr) observer_->on_next(index);
  }
  // Sets the rank for which this rank waits now; -1 if it waits for none.
  void set_waiting_for(int rank) {
    waiting_for_.store(rank, std::memory_order_relaxed);
    if (mirror_ != nullptr) mirror_->waiting_for.store(rank, std::memory_order_relaxed);
  }
  // A part of an all_to_all_v for which the sender and the receiver expect different sizes.
  struct PartMismatch {
    int sender = -1;  // -1 if all sizes match
    int receiver = -1;
    uint64_t sent_bytes = 0;
    uint64_t expected_bytes = 0;
  };

  // Notes the number and fingerprint of the different operation that a peer called.
  void set_mismatch(Rank peer, uint64_t number, const Fingerprint& fingerprint) {
    mismatch_peer = peer;
    mismatch_number = number;
    mismatch_fingerprint = fingerprint;
  }

  // Notes the operation that this rank called under the peer's number, if that is not the running
  // operation.
  void set_own_call(uint64_t number, const Fingerprint& fingerprint) {
    own_number = number;
    own_fingerprint = fingerprint;
  }

  const char* phase() const { return phase_.load(std::memory_order_relaxed); }
  int waiting_for() const { return waiting_for_.load(std::memory_order_relaxed); }
  size_t index() const { return index_.load(std::memory_order_relaxed); }

  int mismatch_peer = -1;  // read only by the thread that runs the operation, after its failure
  uint64_t mismatch_number = 0;
  Fingerprint mismatch_fingerprint;
  uint64_t own_number = 0;  // 0 if this is the running operation
  Fingerprint own_fingerprint;
  PartMismatch part_mismatch;  // read only by the thread that runs the operation, after its failure

 private:
  void copy_phase(const char* text) {
    std::array<uint64_t, 2> words{};
    std::memcpy(words.data(), text, std::min(std::strlen(text), sizeof(words)));
    mirror_->phase[0].store(words[0], std::memory_order_relaxed);
    mirror_->phase[1].store(words[1], std::memory_order_relaxed);
  }

  ProgressMirror* mirror_ = nullptr;
  std::atomic<const char*> phase_{"enter"};
  std::atomic<int> waiting_for_{-1};
  std::atomic<size_t> index_{0};
  Observer* observer_ = nullptr;
};

// Passed to a Backend with each call of submit().
struct OpContext {
  // The number of the call's first collective; the others have the following numbers. Collectives
  // of a group are counted from 1, equally on all ranks.
  uint64_t number;
  // The fingerprints of the collectives of the call, in order; never empty.
  std::span<const Fingerprint> fingerprints;
  Deadline deadline;  // the deadline of the whole call
  OpProgress& progress;

  const Fingerprint& fingerprint() const { return fingerprints.front(); }
  // Returns the context for the collectives of the call from `index` on.
  OpContext from(size_t index) const {
    return {number + index, fingerprints.subspan(index), deadline, progress};
  }
};

}  // namespace cadre
