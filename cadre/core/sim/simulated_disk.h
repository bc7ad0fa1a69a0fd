// A disk in memory that can be full, fail a chosen operation, and lose power.
//
// Every operation of a file or of the file system is counted, and one of them can be made to fail,
// so that a test can fail the first, the second, ... of a writer until it makes no more; so can
// that operation and all later ones, as when the power fails there. A write or an append that fails
// has written half of its data. What was not synced is lost with the power: the content of a file
// since its last sync, and the entries of a folder since the last sync of the folder. A file system
// may also have written some of these changes to the disk; the worst of them are those that only
// destroy, so lose_power() can keep these.
//
// Threads: any. Blocking: never. Lifetime: outlives its files. Errors: kUnavailable, as on a disk.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/os/file_system.h"

namespace cadre::sim {

// Which changes that were not synced are on the disk after a loss of power.
enum class Unsynced {
  kNone,
  // A file or folder that was removed is gone, and of a file that was changed there is only what it
  // had before the first changed byte; renames and what was added are lost.
  kOnlyWhatDestroys,
};

class SimulatedDisk final : public os::FileSystem {
 public:
  explicit SimulatedDisk(size_t capacity_bytes = std::numeric_limits<size_t>::max())
      : capacity_bytes_(capacity_bytes) {}

  // Fails the number-th operation from now, counted from 1; 0: none.
  void fail_operation(uint64_t number);
  // Fails the number-th operation from now and all after it, until lose_power().
  void cut_power_at(uint64_t number);
  // Whether that operation was reached.
  bool has_failed() const;
  // Forgets what was not synced; then operations work again. REQUIRES: no file is open.
  void lose_power(Unsynced kept = Unsynced::kNone);

  Result<std::unique_ptr<os::OutputFile>> create(const std::string& path) override;
  Result<std::unique_ptr<os::SizedFile>> create_sized(const std::string& path,
                                                      size_t num_bytes) override;
  Result<std::string> create_beside(const std::string& path) override;
  Result<std::string> make_folder_beside(const std::string& path) override;
  Result<std::unique_ptr<os::SharedFile>> open_shared(const std::string& path) override;
  Result<std::string> read(const std::string& path, size_t max_bytes) override;
  Result<std::optional<os::FileKind>> kind_of(const std::string& path) override;
  Result<std::vector<std::string>> list(const std::string& folder) override;
  Status make_folder(const std::string& path) override;
  Status sync(const std::string& path) override;
  Status rename(const std::string& from, const std::string& to) override;
  Status exchange(const std::string& from, const std::string& to) override;
  Status remove(const std::string& path) override;

 private:
  struct Node;
  using NodePtr = std::shared_ptr<Node>;  // shared by entries, synced entries and open files
  using Entries = std::map<std::string, NodePtr>;
  struct Node {
    bool is_folder = false;
    std::string content;
    std::string synced_content;
    Entries entries;
    Entries synced_entries;
    const void* writer = nullptr;  // the handle that has the lock
    std::set<const void*> present;
  };
  class Output;
  class Shared;
  class Sized;

  // All under the lock.
  Status begin(std::string_view what, const std::string& path);
  Status write(Node& node, size_t offset, ConstBytes data, const std::string& path);
  NodePtr find(std::string_view path) const;
  // The entries of the folder in which the path is, and its name there; null if there is none.
  std::pair<Entries*, std::string> place_of(const std::string& path) const;
  NodePtr make_file(const std::string& path);

  const size_t capacity_bytes_;
  mutable std::mutex mutex_;
  uint64_t num_operations_ = 0;
  uint64_t failing_ = 0;
  bool is_power_cut_ = false;  // at the failing operation
  uint64_t num_temporary_ = 0;
  size_t num_bytes_ = 0;
  std::set<NodePtr> removed_;  // since the power was lost
  const NodePtr root_ = std::make_shared<Node>(Node{.is_folder = true});
};

}  // namespace cadre::sim
