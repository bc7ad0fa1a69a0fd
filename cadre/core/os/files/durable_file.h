// Files and folders that survive a power cut, for data that is large or consists of several files
// and must appear as a whole.
//
// Write the files into a temporary folder with write_file, then publish it with rename_path: a
// reader sees all of them or none. For one small file use replace_file (file.h).
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

// Creates or replaces `path` with the concatenated pieces, and syncs the file. Removes the file
// after an error.
CADRE_EXPORT Status write_file(FileSystem& files, const std::string& path,
                               std::span<const ConstBytes> pieces);
// Syncs `from` (a folder's entries, too), renames it to `to` and syncs the folder of `to`. A folder
// can replace only an empty folder.
CADRE_EXPORT Status rename_path(FileSystem& files, const std::string& from, const std::string& to);
// Exchanges two existing files or folders atomically. Folders need not be empty. Syncs like
// rename_path().
CADRE_EXPORT Status exchange_paths(FileSystem& files, const std::string& from,
                                   const std::string& to);
// Makes the folder and its missing parents, and syncs each of them.
CADRE_EXPORT Status make_folders(FileSystem& files, const std::string& path);
// Removes a file, or a folder with its content; does nothing if the path does not exist. Follows no
// links.
CADRE_EXPORT Status remove_all(FileSystem& files, const std::string& path);
// Replaces one file as replace_file() of file.h does, but on `files`.
CADRE_EXPORT Status replace_file(FileSystem& files, const std::string& path, ConstBytes content);

// Does the same as the other write_file(), on the file system of the operating system.
CADRE_EXPORT Status write_file(const std::string& path, std::span<const ConstBytes> pieces);

}  // namespace cadre::os
