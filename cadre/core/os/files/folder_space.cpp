#include "cadre/core/os/files/folder_space.h"

#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {
namespace {

struct KnownFileSystem {
  uint64_t magic;
  const char* name;
  bool is_shared;
};

// <linux/magic.h> lacks the last ones, which are from their own sources.
constexpr std::array kFileSystems{KnownFileSystem{EXT4_SUPER_MAGIC, "ext4", false},
                                  KnownFileSystem{XFS_SUPER_MAGIC, "xfs", false},
                                  KnownFileSystem{BTRFS_SUPER_MAGIC, "btrfs", false},
                                  KnownFileSystem{F2FS_SUPER_MAGIC, "f2fs", false},
                                  KnownFileSystem{TMPFS_MAGIC, "tmpfs", false},
                                  KnownFileSystem{RAMFS_MAGIC, "ramfs", false},
                                  KnownFileSystem{OVERLAYFS_SUPER_MAGIC, "overlay", false},
                                  KnownFileSystem{NFS_SUPER_MAGIC, "nfs", true},
                                  KnownFileSystem{SMB_SUPER_MAGIC, "smb", true},
                                  KnownFileSystem{CIFS_SUPER_MAGIC, "cifs", true},
                                  KnownFileSystem{SMB2_SUPER_MAGIC, "smb", true},
                                  KnownFileSystem{CEPH_SUPER_MAGIC, "ceph", true},
                                  KnownFileSystem{FUSE_SUPER_MAGIC, "fuse", true},
                                  KnownFileSystem{V9FS_MAGIC, "9p", true},
                                  KnownFileSystem{0x2fc12fc1, "zfs", false},
                                  KnownFileSystem{0x0bd00bd0, "lustre", true},
                                  KnownFileSystem{0x47504653, "gpfs", true}};

}  // namespace

Result<FolderSpace> read_folder_space(const std::string& path) {
  struct stat info {};
  struct statfs status {};
  if (::stat(path.c_str(), &info) != 0 || ::statfs(path.c_str(), &status) != 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("folder {}", path), errno);
  }
  if (!S_ISDIR(info.st_mode)) {
    return Error(ErrorCode::kInvalidArgument, cadre::format("{} is no folder", path));
  }
  const auto block = static_cast<uint64_t>(status.f_frsize);
  // The magic number of some file systems is negative as a long.
  const auto magic = static_cast<uint32_t>(status.f_type);
  const auto known = std::ranges::find(kFileSystems, magic, &KnownFileSystem::magic);
  return FolderSpace{.free_bytes = static_cast<uint64_t>(status.f_bavail) * block,
                     .total_bytes = static_cast<uint64_t>(status.f_blocks) * block,
                     .free_files = static_cast<uint64_t>(status.f_ffree),
                     .total_files = static_cast<uint64_t>(status.f_files),
                     .file_system = known == kFileSystems.end() ? cadre::format("{:#x}", magic)
                                                                : std::string(known->name),
                     .is_shared = known != kFileSystems.end() && known->is_shared,
                     .is_writable = ::access(path.c_str(), W_OK | X_OK) == 0};
}

}  // namespace cadre::os
