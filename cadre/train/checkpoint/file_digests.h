// Digests of the files of a folder, in a file of the folder that `b2sum --check B2SUMS` reads.
//
// BLAKE2b: docs/decisions/0008 gives the reasons.
// Threads: any, for different folders. Blocking: reads the files. Errors: as declared; kUnavailable
// with the path for a file that cannot be read.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/os/file_system.h"

namespace cadre {

inline constexpr std::string_view kDigestsName = "B2SUMS";

struct FileDigest {
  std::string name;
  std::string digest;  // the digest in hexadecimal
};

// Converts an error of os::VersionedFile to one of a snapshot: kCorruption for a file that was cut
// short while it was read.
Error corruption_of_cut_file(const Error& error);

// Returns the digest of a file. Fails with kCorruption if the file does not exist.
Result<std::string> digest_of(const std::string& path);
// Writes and syncs B2SUMS with digests that were computed before, for example by several ranks.
Status write_digest_list(os::FileSystem& files, const std::string& folder,
                         std::span<const FileDigest> digests);

// Writes and syncs the digests of these files of the folder.
CADRE_EXPORT Status write_digests(const std::string& folder,
                                  std::span<const std::string_view> names);

// Fails with kCorruption and the path of the first file whose bytes have changed, or of B2SUMS if
// it is malformed or lacks one of the names.
CADRE_EXPORT Status check_digests(const std::string& folder,
                                  std::span<const std::string_view> names);

}  // namespace cadre
