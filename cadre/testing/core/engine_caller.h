// Calls an engine directly, one collective at a time, in the way in which a Communicator does, for
// tests of an engine without a group.
//
// Threads: one thread for each rank; progress() from any thread. Blocking: every operation, until
// its deadline. Lifetime: borrows the System. Errors: the Status that the engine returns.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "cadre/core/base/types.h"
#include "cadre/core/collective/backend.h"
#include "cadre/core/collective/collective.h"
#include "cadre/core/collective/reduce.h"
#include "cadre/core/os/system.h"

namespace cadre {

class EngineCaller {
 public:
  EngineCaller(os::System& system, Rank rank, int world_size)
      : system_(system), rank_(rank), world_size_(world_size) {}
  virtual ~EngineCaller() = default;
  EngineCaller(const EngineCaller&) = delete;
  EngineCaller& operator=(const EngineCaller&) = delete;

  virtual Backend& engine() = 0;
  // The progress of the last operation. All operations use this object.
  OpProgress& progress() { return progress_; }
  void set_patience(Duration patience) { patience_ = patience; }

  Status all_gather(ConstBytes in, Bytes out) {
    return run(Collective::all_gather(in, out, DType::kUint8));
  }
  Status broadcast(Bytes data, Rank root) {
    return run(Collective::broadcast(data, DType::kUint8, root));
  }
  // `out` may be empty on ranks other than the root.
  Status reduce(ConstBytes in, Bytes out, ReduceKind kind, Rank root) {
    return run(Collective::reduce(in, out, kind.dtype, kind.op, root));
  }
  Status gather(ConstBytes in, Bytes out, Rank root) {
    return run(Collective::gather(in, out, DType::kUint8, root));
  }
  Status scatter(ConstBytes in, Bytes out, Rank root) {
    return run(Collective::scatter(in, out, DType::kUint8, root));
  }
  Status all_to_all(ConstBytes in, Bytes out) {
    return run(Collective::all_to_all(in, out, DType::kUint8));
  }
  Status all_to_all_v(ConstBytes in, Bytes out, const PartSizes& sizes) {
    return run(Collective::all_to_all_v(in, out, DType::kUint8, {sizes.sent, sizes.received}));
  }
  Status barrier() { return run(Collective::barrier()); }
  // Passes several collectives to the engine in one call.
  Status submit(std::span<Collective> collectives) {
    std::vector<Fingerprint> fingerprints;
    for (Collective& collective : collectives) {
      const auto descriptor = validate(collective, rank_, world_size_);
      if (!descriptor.ok()) return descriptor.error();
      fingerprints.push_back(descriptor->fingerprint());
    }
    const uint64_t first = number_ + 1;
    number_ += collectives.size();
    return engine()
        .submit({.number = first,
                 .fingerprints = fingerprints,
                 .deadline = system_.deadline_in(patience_),
                 .progress = progress_},
                collectives)
        .status();
  }
  // Skips an operation number. An operation that fails before the engine gets it does the same.
  void skip_number() { ++number_; }

 protected:
  Status run(Collective collective) { return submit({&collective, 1}); }

 private:
  os::System& system_;
  const Rank rank_;
  const int world_size_;
  uint64_t number_ = 0;
  Duration patience_ = std::chrono::seconds(60);
  OpProgress progress_;
};

}  // namespace cadre
