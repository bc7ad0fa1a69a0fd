// Divides the comparison of a snapshot's files with their digests among the ranks that load it.
//
// Threads: pure functions. Blocking: never. Lifetime: plain values. Errors: kInternal for a text
// that encode_file_view() did not write. A file that a rank reads is compared by that rank, or by
// one that reads the same file: ranks on other machines, or with other mounts, may have other bytes
// under the same path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"

namespace cadre {

// What a rank knows about the snapshot that it is about to load.
struct FileView {
  std::string options;        // equal on all ranks, as the fingerprint
  std::string fingerprint;    // of the snapshot
  std::string sight;          // SnapshotReader::sight()
  std::vector<size_t> files;  // that this rank reads, as indices

  friend bool operator==(const FileView&, const FileView&) = default;
};

std::string encode_file_view(const FileView& view);
Result<FileView> decode_file_view(std::string_view text);

// The files that each rank compares, by rank. Each file that ranks of one sight read is compared by
// one of these ranks, and a file that no rank reads by one rank, so that about equally many bytes
// are compared by each rank of one sight. num_bytes: of each file.
std::vector<std::vector<size_t>> share_digests(std::span<const FileView> by_rank,
                                               std::span<const uint64_t> num_bytes);

}  // namespace cadre
