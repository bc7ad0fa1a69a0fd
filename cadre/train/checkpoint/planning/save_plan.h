// Plans which rank writes which boxes of which tensors to which file. The plan is a pure function
// of the tensors that the ranks hold, so all ranks compute the same plan.
//
// A box is a rectangular part of a tensor, given by offsets and sizes. A box that several ranks
// hold (replicas) is written once, by the rank among them that has the fewest bytes to write so
// far. If boxes of different ranks overlap without being equal, the plan cuts them into smaller
// boxes, each inside one box of the rank that writes it. A file has at most one box of a tensor, as
// torch.distributed.checkpoint requires for safetensors. Threads: plain values. Errors:
// kInvalidArgument that names the tensor and the ranks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/wire/snapshot_manifest.h"
#include "cadre/tensor/mesh/placement.h"

namespace cadre {

// A tensor and the boxes of it that a rank holds. The list of boxes is empty if the rank only has
// the tensor's name, for example because another rank writes this buffer. `tensor.pieces` is not
// used.
struct HeldTensor {
  ManifestTensor tensor;
  std::vector<Box> boxes;
  std::string value;  // the bytes of a scalar, which must be equal on all ranks

  friend bool operator==(const HeldTensor&, const HeldTensor&) = default;
};

std::string encode_held(std::span<const HeldTensor> held);
// Fails with kInternal for a text that encode_held() did not write.
Result<std::vector<HeldTensor>> decode_held(std::string_view text);

struct PlannedFile {
  Rank writer;
  bool is_optimizer = false;
  // The indices in SavePlan::manifest.tensors of the tensors that have a piece in this file.
  std::vector<size_t> tensors;
};

struct SavePlan {
  SnapshotManifest manifest;       // complete except for the sizes of the files
  std::vector<PlannedFile> files;  // in the order of manifest.files
};

// Computes the plan; by_rank[r] lists the tensors that rank r holds. Every rank must list the names
// of all tensors of the model, because a load throws on a rank whose model lacks one.
Result<SavePlan> plan_save(std::span<const std::vector<HeldTensor>> by_rank);

}  // namespace cadre
