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

// Call it in one process only. Replaces `path` atomically. The tensors are read directly into the
// new file, which is mapped, so no memory for whole tensors is needed. cadre::load() can read the
// file if `content` is kModel.
CADRE_EXPORT void write_full_state(const std::string& snapshot, const std::string& path,
                                   SnapshotContent content = SnapshotContent::kModel);

}  // namespace cadre
