// Names the files of the flight records of a process's groups, and removes those of closed groups
// except for the newest few.
//
// Threads: any. Blocking: while the file system works. Lifetime: owned by the fabric. Errors: none;
// a file that cannot be removed stays.
// The record of the first group has the path in the options of that group, NAME.flight. Records of
// groups that were split off from it lie in the same folder, as NAME+GROUP@BIRTH.flight. A later
// process or fabric with the same NAME treats a record in that folder as closed if the record is
// marked as closed or the process that wrote it has ended.
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
  // The number of records that are kept: of groups that were closed without a failure, and of
  // groups that had failed.
  static constexpr size_t kMaxClosed = 8;
  static constexpr size_t kMaxFailed = 32;

  // `path` is the path of the first group's record. If it is empty, there are no files.
  explicit FlightFiles(std::string path);

  // Returns the path for a group that was split off from the first one; an empty path if records
  // are not written to files.
  std::string path_for(const GroupIdentity& identity, std::string_view name) const;
  // Returns the path for the first group. It is the path in its options, unless that path belongs
  // to another group: a subgroup that is rejoined has options with the path of its own record.
  std::string path_for_first(const GroupIdentity& identity, std::string_view name) const;
  // Called when the group with this record was closed. Removes the oldest records of closed groups.
  // The record at the path in the options is never removed.
  void release(const std::string& path, bool has_failed);

 private:
  void adopt_earlier();

  std::string folder_;
  std::string name_;  // if empty, no files are written
  const std::string first_;
  std::mutex mutex_;
  std::deque<std::string> closed_;  // the names of closed records, the oldest first
  std::deque<std::string> failed_;
};

}  // namespace cadre
