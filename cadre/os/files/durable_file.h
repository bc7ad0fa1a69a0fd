// Files and folders that survive a power cut: what large or several files need to appear as one.
//
// Write the files into a temporary folder with write_file, then publish it with rename_path: a
// reader sees all of them or none. One small file alone: replace_file (file.h).
// Threads: any. Blocking: for the time of the disk. Lifetime: borrows the FileSystem for the call.
// Errors: kUnavailable with the path and the system's reason (a full disk, missing rights).
#pragma once

#include <span>
#include <string>

#include "cadre/base/error.h"
#include "cadre/base/export.h"
#include "cadre/base/types.h"
#include "cadre/os/file_system.h"

namespace cadre::os {

// Creates or replaces `path` with the pieces one after the other, and syncs it. After an error the
// file is gone.
CADRE_EXPORT Status write_file(FileSystem& files, const std::string& path,
                               std::span<const ConstBytes> pieces);
// Syncs `from` (a folder's entries, too), renames it to `to` and syncs the folder of `to`. A folder
// can replace only an empty folder.
CADRE_EXPORT Status rename_path(FileSystem& files, const std::string& from, const std::string& to);
// As rename_path where `to` exists already, a full folder, too: the two names change places in one
// step, and what `to` was is now `from`.
CADRE_EXPORT Status exchange_paths(FileSystem& files, const std::string& from,
                                   const std::string& to);
// As in file.h.
CADRE_EXPORT Status replace_file(FileSystem& files, const std::string& path, ConstBytes content);

// The same on the file system of the operating system.
CADRE_EXPORT Status write_file(const std::string& path, std::span<const ConstBytes> pieces);
CADRE_EXPORT Status rename_path(const std::string& from, const std::string& to);
CADRE_EXPORT Status exchange_paths(const std::string& from, const std::string& to);
// An empty file in the folder of `path`, of a name that no other file has: to be written with
// write_file and published with rename_path.
CADRE_EXPORT Result<std::string> create_file_beside(const std::string& path);

}  // namespace cadre::os
