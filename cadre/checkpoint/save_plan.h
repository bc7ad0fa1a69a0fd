// Which rank writes which boxes of which tensors into which file: a pure function of what the ranks
// hold, so that all ranks compute it alike.
//
// Threads: plain values. Blocking: never. Lifetime: values own what they hold.
// Errors: kInvalidArgument that names the tensor and the ranks.
// A box that several ranks hold (replicas) is written once, by the one of them that has the fewest
// bytes to write so far. A file has at most one box of a tensor, as the convention of
// torch.distributed.checkpoint for safetensors asks for.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/base/types.h"
#include "cadre/mesh/placement.h"
#include "cadre/wire/snapshot_manifest.h"

namespace cadre {

// A tensor of which a rank holds these boxes. The pieces of `tensor` are not used.
struct HeldTensor {
  ManifestTensor tensor;
  std::vector<Box> boxes;
  std::string value;  // the bytes of a scalar, which must be equal on all ranks

  friend bool operator==(const HeldTensor&, const HeldTensor&) = default;
};

std::string encode_held(std::span<const HeldTensor> held);
// kInternal for a text that encode_held() did not write.
Result<std::vector<HeldTensor>> decode_held(std::string_view text);

struct PlannedFile {
  Rank writer;
  bool is_optimizer = false;
  // Of SavePlan::manifest.tensors; of each the piece that names this file.
  std::vector<size_t> tensors;
};

struct SavePlan {
  SnapshotManifest manifest;       // but for the sizes of the files
  std::vector<PlannedFile> files;  // by index of manifest.files
};

// The files' tensors and what is in them, by rank of what it holds.
Result<SavePlan> plan_save(std::span<const std::vector<HeldTensor>> by_rank);

}  // namespace cadre
