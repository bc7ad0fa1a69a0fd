// Digests of the files of a folder, stored in its file B2SUMS, which `b2sum --check B2SUMS` reads.
//
// The digest is BLAKE2b; docs/decisions/0008 gives the reasons. Threads: any, for different
// folders. Blocking: reads the files. Errors: as declared below; kUnavailable with the path if a
// file cannot be read.
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

// Replaces an error of os::VersionedFile by the error that a user of snapshots gets: kCorruption
// for a file that was cut short while it was read.
Error corruption_of_cut_file(const Error& error);

// Returns the digest of a file. Fails with kCorruption if the file does not exist.
Result<std::string> digest_of(const std::string& path);
// Writes and syncs B2SUMS with digests that were computed before, for example by several ranks.
Status write_digest_list(os::FileSystem& files, const std::string& folder,
                         std::span<const FileDigest> digests);

// Computes the digests of these files of the folder, then writes and syncs B2SUMS.
CADRE_EXPORT Status write_digests(const std::string& folder,
                                  std::span<const std::string_view> names);

// Compares the named files with B2SUMS. Fails with kCorruption and the path of the first file whose
// bytes have changed, or the path of B2SUMS if it is malformed or does not list one of the names.
CADRE_EXPORT Status check_digests(const std::string& folder,
                                  std::span<const std::string_view> names);

}  // namespace cadre
