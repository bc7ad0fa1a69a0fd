// The whole tensors of a sharded snapshot in one safetensors file, as if one process had saved
// them.
//
// Threads: one. Blocking: for the time of the disk. Errors: cadre::Error, as load_sharded(); after
// one `path` is as it was. Source: torch.distributed.checkpoint's consolidation.
#pragma once

#include <string>

#include "cadre/base/export.h"

namespace cadre {

enum class SnapshotContent { kModel, kOptimizer };

// Of kModel the file is one that cadre::load() reads. Called by one process; the tensors go from
// file to file and need no memory of their own. Replaces `path` in one step.
CADRE_EXPORT void write_full_state(const std::string& snapshot, const std::string& path,
                                   SnapshotContent content = SnapshotContent::kModel);

}  // namespace cadre
