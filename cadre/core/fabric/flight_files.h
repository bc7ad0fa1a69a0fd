// Names the files of the flight records of a process's groups, and removes those of closed groups
// except for the newest few.
//
// Threads: any. Blocking: for the time of the disk. Lifetime: owned by the fabric. Errors: none; a
// file that cannot be removed stays.
// The record of the first group lies where its options say, NAME.flight. Records of groups that
// come from it lie beside it, as NAME+GROUP@BIRTH.flight. A later process or fabric with the same
// NAME treats a record that it finds there as closed if the record says so or its writer has ended.
#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>

#include "cadre/core/fabric/group_identity.h"

namespace cadre {

class FlightFiles {
 public:
  // The number of records that are kept of groups that were closed in good order, and of groups
  // that had failed.
  static constexpr size_t kMaxClosed = 8;
  static constexpr size_t kMaxFailed = 32;

  // `path` is the path of the first group's record. If it is empty, there are no files.
  explicit FlightFiles(std::string path);

  // Returns the path for a group that comes from the first one; empty if there are no files.
  std::string path_for(const GroupIdentity& identity, std::string_view name) const;
  // Returns the path for the first group: the one in its options, unless that is the record of
  // another group because a subgroup was rejoined with its own options.
  std::string path_for_first(const GroupIdentity& identity, std::string_view name) const;
  // Called when the group with this record was closed. Removes the oldest records; the one at the
  // path in the options stays.
  void release(const std::string& path, bool has_failed);

 private:
  void adopt_earlier();

  std::string folder_;
  std::string name_;  // if empty, no files are written
  const std::string first_;
  std::mutex mutex_;
  std::deque<std::string> closed_;  // the names of closed records, of which the oldest comes first
  std::deque<std::string> failed_;
};

}  // namespace cadre
