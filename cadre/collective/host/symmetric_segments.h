// The segments in which every rank of a host group has a slice, and where a buffer lies in them.
//
// Threads: any; a small mutex guards the table and is never held across a wait.
// Blocking: never. Lifetime: shares the mappings until they are removed.
// Errors: kInvalidArgument for an id that is taken or a segment that is too small.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/base/types.h"
#include "cadre/os/shared_memory.h"

namespace cadre {

// Rank r's slice is bytes [r * bytes_per_rank, (r + 1) * bytes_per_rank) of the mapping.
struct SymmetricSegment {
  uint32_t id = 0;  // equal on all ranks, never 0, never used again
  std::shared_ptr<os::SharedMemory> memory;
  size_t bytes_per_rank = 0;
};

namespace host {

// A place in a rank's slice, as other ranks can resolve it; segment 0 means "not symmetric".
struct SymmetricPlace {
  uint32_t segment = 0;
  uint32_t padding = 0;  // named, because places travel as bytes
  uint64_t offset = 0;
};

class SymmetricSegments {
 public:
  explicit SymmetricSegments(int world_size) : world_size_(world_size) {}

  void add(SymmetricSegment segment);
  void remove(uint32_t id);

  // Where in this rank's slice of a segment the whole buffer lies.
  SymmetricPlace find(ConstBytes buffer, Rank rank) const;
  // A copy that keeps the mapping; nullopt for an id that is not here.
  std::optional<SymmetricSegment> get(uint32_t id) const;

 private:
  const int world_size_;
  mutable std::mutex mutex_;
  std::vector<SymmetricSegment> segments_;  // few: searched one by one
};

}  // namespace host
}  // namespace cadre
