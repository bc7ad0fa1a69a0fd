// Intercepts file operations of the code under test: fails the n-th operation that changes a file,
// and afterwards reverts everything that a power failure at that moment could have lost.
//
// The test program defines open, write, fsync, rename, ..., which precede those of the C library in
// symbol lookup, so that every call is counted while a fault is armed, and passed on to the kernel.
// In the worst case a power failure loses the content of a file that was not synced since its last
// write, and each entry of a folder (new names, renames) that was created since the folder was
// synced; later removals have no effect. Threads: operations from any; arm and disarm in one.
// Blocking: never.
#pragma once

#include <cstdint>
#include <string>

namespace cadre::snapshot_test {

enum class FaultKind {
  kError,     // the n-th operation fails with a full disk; all others work
  kPowerCut,  // the n-th and all later ones fail, as if there were no process any more
};

class FileFault {
 public:
  // Counts from 1.
  FileFault(FaultKind kind, int64_t n);
  ~FileFault();
  FileFault(const FileFault&) = delete;
  FileFault& operator=(const FileFault&) = delete;

  // Whether the n-th operation was reached.
  bool has_struck() const;
  // Disarms the fault and reverts everything that was not synced in this folder and its subfolders.
  void lose_what_was_not_synced(const std::string& root);
};

}  // namespace cadre::snapshot_test
