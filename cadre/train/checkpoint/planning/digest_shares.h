// Divides the work of comparing a snapshot's files with their digests among the ranks that load it.
//
// Threads: pure functions. Lifetime: plain values. Errors: kInternal for a text that
// encode_file_view() did not write. A file that a rank reads is compared by that rank, or by
// another rank that reads the same file. An equal path does not prove that the file is the same: on
// another machine, or with other mounts, the path may lead to other bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"

namespace cadre {

// The files of a snapshot as one rank sees them before it loads the snapshot.
struct FileView {
  std::string options;        // must be equal on all ranks
  std::string fingerprint;    // identifies the snapshot; must be equal on all ranks
  std::string sight;          // the result of SnapshotReader::sight(): which files the rank sees
  std::vector<size_t> files;  // the indices of the files that this rank reads

  friend bool operator==(const FileView&, const FileView&) = default;
};

std::string encode_file_view(const FileView& view);
Result<FileView> decode_file_view(std::string_view text);

// Returns the files that each rank compares, indexed by rank. Ranks with an equal `sight` see the
// same files: each file that any of them reads is compared by one of them, and they compare about
// equally many bytes. A file that no rank reads is compared by any one rank. num_bytes[f] is the
// size of file f.
std::vector<std::vector<size_t>> share_digests(std::span<const FileView> by_rank,
                                               std::span<const uint64_t> num_bytes);

}  // namespace cadre
