// Files and folders that survive a power cut: what large or several files need to appear as one.
//
// Write the files into a temporary folder with write_file, then publish it with rename_path: a
// reader sees all of them or none. One small file alone: replace_file (file.h).
// Threads: any. Blocking: for the time of the disk. Lifetime: borrows the FileSystem for the call.
// Errors: kUnavailable with the path and the system's reason (a full disk, missing rights).
#pragma once

#include <span>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/file_system.h"

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
// Makes the folder and the missing ones above it, each durable.
CADRE_EXPORT Status make_folders(FileSystem& files, const std::string& path);
// Removes a file, or a folder with all that is in it; nothing if there is none. Follows no links.
CADRE_EXPORT Status remove_all(FileSystem& files, const std::string& path);
// As in file.h.
CADRE_EXPORT Status replace_file(FileSystem& files, const std::string& path, ConstBytes content);

// On the file system of the operating system.
CADRE_EXPORT Status write_file(const std::string& path, std::span<const ConstBytes> pieces);

}  // namespace cadre::os
