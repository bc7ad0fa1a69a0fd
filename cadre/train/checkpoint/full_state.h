// Writes the whole tensors of a sharded snapshot to one safetensors file, as if one process had
// saved them.
//
// Threads: one. Blocking: reads and writes a disk. Errors: cadre::Error, as load_sharded(); `path`
// is unchanged after an error. Source: torch.distributed.checkpoint's consolidation.
#pragma once

#include <string>

#include "cadre/core/base/export.h"

namespace cadre {

enum class SnapshotContent { kModel, kOptimizer };

// A result with kModel can be read by cadre::load(). Called by one process. Copies the tensors
// between mapped files, without memory for whole tensors. Replaces `path` atomically.
CADRE_EXPORT void write_full_state(const std::string& snapshot, const std::string& path,
                                   SnapshotContent content = SnapshotContent::kModel);

}  // namespace cadre
