// Stands between the code under test and the file system: fails the n-th operation that changes a
// file, and afterwards takes back everything that a power cut at that moment could have lost.
//
// The program's own open, write, fsync, rename, ... come first in the search for symbols, so that
// every call of the program is counted while a fault is armed, and passed on to the kernel.
// What a power cut loses, in the worst case: the content of a file that was not synced since its
// last write, and each entry of a folder (new names, renames) that was made since the folder was
// synced; after it nothing is removed. Threads: operations from any; arm and disarm in one.
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

  // Whether the n-th operation came.
  bool has_struck() const;
  // Ends the fault and takes back what was not synced in this folder and below.
  void lose_what_was_not_synced(const std::string& root);
};

}  // namespace cadre::snapshot_test
