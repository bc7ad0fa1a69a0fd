// A disk in memory that can be full, fail a chosen operation, and lose power.
//
// Every operation of a file or of the file system is counted, and a test can make one of them fail:
// the first, the second, ... operation, until the tested code makes no more operations. A test can
// also make that operation and all later ones fail, like a loss of power. A write or an append that
// fails has written half of its data. A loss of power drops what was not synced: the content of a
// file since its last sync, and the entries of a folder since the last sync of the folder. A real
// disk may have stored some of these changes. The worst case are changes that only destroy data, so
// lose_power() can keep exactly these.
//
// Threads: any. Blocking: never. Lifetime: outlives its files. Errors: kUnavailable, like a real
// disk.
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

// Which unsynced changes are on the disk after a loss of power.
enum class Unsynced {
  kNone,
  // Removed files and folders are gone, and a changed file ends before its first changed byte;
  // renames and added data are lost.
  kOnlyWhatDestroys,
};

class SimulatedDisk final : public os::FileSystem {
 public:
  explicit SimulatedDisk(size_t capacity_bytes = std::numeric_limits<size_t>::max())
      : capacity_bytes_(capacity_bytes) {}

  // Lets the number-th operation from now fail, counted from 1; with 0 none fails.
  void fail_operation(uint64_t number);
  // Lets the number-th operation from now and all after it fail, until lose_power().
  void cut_power_at(uint64_t number);
  // Returns whether the operation that was to fail has been reached.
  bool has_failed() const;
  // Drops unsynced changes except `kept`; then operations work again. REQUIRES: no file is open.
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
  using NodePtr = std::shared_ptr<Node>;  // shared by folder entries, synced entries and open files
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

  // REQUIRES for these methods: mutex_ is locked.
  Status begin(std::string_view what, const std::string& path);
  Status write(Node& node, size_t offset, ConstBytes data, const std::string& path);
  NodePtr find(std::string_view path) const;
  // Returns the entries of the parent folder of `path`, and the last part of the path; null if the
  // folder does not exist.
  std::pair<Entries*, std::string> place_of(const std::string& path) const;
  NodePtr make_file(const std::string& path);

  const size_t capacity_bytes_;
  mutable std::mutex mutex_;
  uint64_t num_operations_ = 0;
  uint64_t failing_ = 0;
  bool is_power_cut_ = false;  // all operations from number `failing_` on fail
  uint64_t num_temporary_ = 0;
  size_t num_bytes_ = 0;
  // The files and folders that were removed since the last loss of power.
  std::set<NodePtr> removed_;
  const NodePtr root_ = std::make_shared<Node>(Node{.is_folder = true});
};

}  // namespace cadre::sim
