#include "cadre/checkpoint/file_operations_test.h"

#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

namespace cadre::snapshot_test {
namespace {

namespace fs = std::filesystem;

using Inode = std::pair<dev_t, ino_t>;

struct Rename {
  std::string from;
  std::string to;
  bool is_exchange = false;
  std::optional<std::string> replaced = {};  // what the file at `to` held
};

// A change of a folder's entries: a new name, or a rename to the folder.
struct Change {
  Inode folder;
  std::string created = {};  // a name in the folder; empty for a rename
  std::optional<Rename> rename = {};
};

struct State {
  std::mutex mutex;
  FaultKind kind = FaultKind::kError;
  int64_t left = 0;
  std::atomic<bool> is_armed = false;
  bool has_struck = false;
  std::set<Inode> dirty;
  std::vector<Change> changes;  // not synced, in their order
};

State& state() {
  static State the_state;
  return the_state;
}

std::optional<Inode> inode_at(const std::string& path) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) return std::nullopt;
  return Inode(status.st_dev, status.st_ino);
}

std::string folder_of(const std::string& path) {
  const fs::path parent = fs::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

// Counts an operation; returns false if it must fail. REQUIRES: the state's lock is held.
bool may_pass() {
  State& s = state();
  const bool is_down = s.has_struck && s.kind == FaultKind::kPowerCut;
  if (--s.left == 0) s.has_struck = true;
  return !is_down && s.left != 0;
}

int fail_full() {
  errno = ENOSPC;
  return -1;
}

void note_created(const std::string& path) {
  if (const auto folder = inode_at(folder_of(path))) {
    state().changes.push_back({.folder = *folder, .created = fs::path(path).filename().string()});
  }
}

int do_open(const char* path, int flags, mode_t mode) {
  const auto open_it = [&] {
    return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
  };
  if (!state().is_armed || (flags & (O_WRONLY | O_RDWR | O_CREAT)) == 0) return open_it();
  const std::lock_guard lock(state().mutex);
  if (!may_pass()) return fail_full();
  const bool is_new = ::access(path, F_OK) != 0;
  const int opened = open_it();
  if (opened >= 0 && is_new) note_created(path);
  return opened;
}

int do_rename(const char* from, const char* to, unsigned flags) {
  const auto rename_it = [&] {
    return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, flags));
  };
  if (!state().is_armed) return rename_it();
  const std::lock_guard lock(state().mutex);
  if (!may_pass()) return fail_full();
  Rename rename{from, to, (flags & RENAME_EXCHANGE) != 0};
  std::error_code failure;
  if (!rename.is_exchange && fs::is_regular_file(to, failure)) {
    std::ifstream old(to, std::ios::binary);
    rename.replaced = std::string(std::istreambuf_iterator<char>(old), {});
  }
  const int status = rename_it();
  if (status == 0) {
    if (const auto folder = inode_at(folder_of(to))) {
      state().changes.push_back({.folder = *folder, .rename = std::move(rename)});
    }
  }
  return status;
}

ssize_t do_write(int file, const void* data, size_t size) {
  const auto write_it = [&] { return ::syscall(SYS_write, file, data, size); };
  struct stat status = {};
  if (!state().is_armed || ::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    return write_it();
  }
  const std::lock_guard lock(state().mutex);
  if (!may_pass()) return fail_full();
  state().dirty.emplace(status.st_dev, status.st_ino);
  return write_it();
}

int do_fsync(int file) {
  const auto sync_it = [&] { return static_cast<int>(::syscall(SYS_fsync, file)); };
  struct stat status = {};
  if (!state().is_armed || ::fstat(file, &status) != 0) return sync_it();
  const std::lock_guard lock(state().mutex);
  if (!may_pass()) return fail_full();
  const Inode inode(status.st_dev, status.st_ino);
  state().dirty.erase(inode);
  std::erase_if(state().changes, [&](const Change& change) { return change.folder == inode; });
  return 0;
}

// Not counted, but after a power failure removals have no effect.
int do_unlink(int folder, const char* path, int flags) {
  const auto unlink_it = [&] {
    return static_cast<int>(::syscall(SYS_unlinkat, folder, path, flags));
  };
  if (!state().is_armed) return unlink_it();
  const std::lock_guard lock(state().mutex);
  const bool is_down = state().has_struck && state().kind == FaultKind::kPowerCut;
  return is_down ? fail_full() : unlink_it();
}

// Replaces the six letters of a template and calls `make` with the name.
template <typename Make>
int make_unique_name(char* pattern, size_t suffix_begin, const Make& make) {
  static std::atomic<unsigned> next = static_cast<unsigned>(::getpid()) * 1000U;
  const std::lock_guard lock(state().mutex);
  if (state().is_armed && !may_pass()) return fail_full();
  for (;;) {
    const unsigned number = next++ % 1'000'000U;
    std::snprintf(pattern + suffix_begin, 7, "%06u", number);
    const int made = make(pattern);
    if (made < 0 && errno == EEXIST) continue;
    if (made >= 0 && state().is_armed) note_created(pattern);
    return made;
  }
}

void undo(const Change& change) {
  const Rename& rename = *change.rename;
  if (rename.is_exchange) {
    const auto failed = ::syscall(SYS_renameat2, AT_FDCWD, rename.from.c_str(), AT_FDCWD,
                                  rename.to.c_str(), RENAME_EXCHANGE);
    if (failed == 0) return;
    // What was removed under the one name since then was, on the disk, under the other.
    ::syscall(SYS_renameat2, AT_FDCWD, rename.to.c_str(), AT_FDCWD, rename.from.c_str(), 0U);
    return;
  }
  ::syscall(SYS_renameat2, AT_FDCWD, rename.to.c_str(), AT_FDCWD, rename.from.c_str(), 0U);
  if (rename.replaced) std::ofstream(rename.to, std::ios::binary) << *rename.replaced;
}

// In this folder and below.
void lose_entries(const fs::path& folder, const State& s) {
  const auto inode = inode_at(folder.string());
  for (const Change& change : s.changes) {
    if (change.rename || !inode || change.folder != *inode) continue;
    std::error_code failure;
    fs::remove_all(folder / change.created, failure);
  }
  std::error_code failure;
  for (const auto& entry : fs::directory_iterator(folder, failure)) {
    const auto item = inode_at(entry.path().string());
    if (entry.is_directory()) {
      lose_entries(entry.path(), s);
    } else if (item && s.dirty.contains(*item)) {
      fs::resize_file(entry.path(), 0, failure);
    }
  }
}

}  // namespace

FileFault::FileFault(FaultKind kind, int64_t n) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.kind = kind;
  s.left = n;
  s.is_armed = true;
  s.has_struck = false;
  s.dirty.clear();
  s.changes.clear();
}

FileFault::~FileFault() {
  const std::lock_guard lock(state().mutex);
  state().is_armed = false;
}

bool FileFault::has_struck() const {
  const std::lock_guard lock(state().mutex);
  return state().has_struck;
}

void FileFault::lose_what_was_not_synced(const std::string& root) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.is_armed = false;
  for (auto change = s.changes.rbegin(); change != s.changes.rend(); ++change) {
    if (change->rename) undo(*change);
  }
  lose_entries(root, s);
}

}  // namespace cadre::snapshot_test

// The functions that the program calls in place of the C library's.
extern "C" {

using cadre::snapshot_test::do_fsync;
using cadre::snapshot_test::do_open;
using cadre::snapshot_test::do_rename;
using cadre::snapshot_test::do_unlink;
using cadre::snapshot_test::do_write;

int open(const char* path, int flags, ...) {
  mode_t mode = 0;
  if ((flags & (O_CREAT | O_TMPFILE)) != 0) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  return do_open(path, flags, mode);
}

ssize_t write(int file, const void* data, size_t size) {
  return do_write(file, data, size);
}

int fsync(int file) {
  return do_fsync(file);
}

int rename(const char* from, const char* to) noexcept {
  return do_rename(from, to, 0);
}

int renameat2(int, const char* from, int, const char* to, unsigned flags) noexcept {
  return do_rename(from, to, flags);
}

int unlink(const char* path) noexcept {
  return do_unlink(AT_FDCWD, path, 0);
}

// Also for std::filesystem::remove_all(), which is in a shared library.
__attribute__((visibility("default"))) int unlinkat(int folder, const char* path,
                                                    int flags) noexcept {
  return do_unlink(folder, path, flags);
}

char* mkdtemp(char* pattern) noexcept {
  const size_t begin = std::string_view(pattern).size() - 6;
  const int made = cadre::snapshot_test::make_unique_name(pattern, begin, [](const char* name) {
    return static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, name, 0700));
  });
  return made < 0 ? nullptr : pattern;
}

int mkostemp(char* pattern, int flags) {
  const size_t begin = std::string_view(pattern).size() - 6;
  return cadre::snapshot_test::make_unique_name(pattern, begin, [flags](const char* name) {
    return static_cast<int>(
        ::syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CREAT | O_EXCL | flags, 0600));
  });
}

}  // extern "C"
