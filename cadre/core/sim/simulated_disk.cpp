#include "cadre/core/sim/simulated_disk.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre::sim {
namespace {

Error io_error(std::string_view what, const std::string& path, std::string_view reason) {
  return Error(ErrorCode::kUnavailable, format("{} {}: {}", what, path, reason));
}

std::string_view text_of(ConstBytes data) {
  return {reinterpret_cast<const char*>(data.data()), data.size()};
}

}  // namespace

class SimulatedDisk::Output final : public os::OutputFile {
 public:
  Output(SimulatedDisk& disk, NodePtr node, std::string path)
      : disk_(disk), node_(std::move(node)), path_(std::move(path)) {}

  Status write(ConstBytes data) override {
    const std::lock_guard lock(disk_.mutex_);
    return disk_.write(*node_, node_->content.size(), data, path_);
  }
  Status sync() override {
    const std::lock_guard lock(disk_.mutex_);
    CADRE_RETURN_IF_ERROR(disk_.begin("sync", path_));
    node_->synced_content = node_->content;
    return {};
  }

 private:
  SimulatedDisk& disk_;
  const NodePtr node_;
  const std::string path_;
};

class SimulatedDisk::Shared final : public os::SharedFile {
 public:
  Shared(SimulatedDisk& disk, NodePtr node, std::string path)
      : disk_(disk), node_(std::move(node)), path_(std::move(path)) {}
  ~Shared() override {
    unlock();
    leave();
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  Result<bool> try_lock() override {
    const std::lock_guard lock(disk_.mutex_);
    if (node_->writer == nullptr) node_->writer = this;
    return node_->writer == this;
  }
  void unlock() override {
    const std::lock_guard lock(disk_.mutex_);
    if (node_->writer == this) node_->writer = nullptr;
  }
  Status enter() override {
    const std::lock_guard lock(disk_.mutex_);
    node_->present.insert(this);
    return {};
  }
  Result<bool> is_alone() override {
    const std::lock_guard lock(disk_.mutex_);
    return node_->present.size() == 1;
  }
  void leave() override {
    const std::lock_guard lock(disk_.mutex_);
    node_->present.erase(this);
  }
  Result<size_t> size() const override {
    const std::lock_guard lock(disk_.mutex_);
    CADRE_RETURN_IF_ERROR(disk_.begin("stat", path_));
    return node_->content.size();
  }
  Result<size_t> read_at(size_t offset, Bytes buffer) const override {
    const std::lock_guard lock(disk_.mutex_);
    CADRE_RETURN_IF_ERROR(disk_.begin("read", path_));
    if (offset >= node_->content.size()) return size_t{0};
    const size_t num_read = std::min(buffer.size(), node_->content.size() - offset);
    std::copy_n(std::as_bytes(std::span(node_->content)).data() + offset, num_read, buffer.data());
    return num_read;
  }
  Status append_at(size_t offset, ConstBytes data) override {
    {
      const std::lock_guard lock(disk_.mutex_);
      const Status status = disk_.write(*node_, offset, data, path_);
      if (status.ok()) return status;
    }
    const Error error = io_error("write", path_, "the operation failed");
    (void)truncate(offset);
    return error;
  }
  Status truncate(size_t num_bytes) override {
    const std::lock_guard lock(disk_.mutex_);
    CADRE_RETURN_IF_ERROR(disk_.begin("truncate", path_));
    disk_.num_bytes_ -= node_->content.size() - std::min(num_bytes, node_->content.size());
    node_->content.resize(std::min(num_bytes, node_->content.size()));
    return {};
  }
  bool is_named() const override {
    const std::lock_guard lock(disk_.mutex_);
    return disk_.find(path_) == node_;
  }
  Status remove() override {
    if (!is_named()) return {};
    return disk_.remove(path_);
  }

 private:
  SimulatedDisk& disk_;
  const NodePtr node_;
  const std::string path_;
};

class SimulatedDisk::Sized final : public os::SizedFile {
 public:
  explicit Sized(NodePtr node) : node_(std::move(node)) {}
  Bytes bytes() override { return std::as_writable_bytes(std::span(node_->content)); }

 private:
  const NodePtr node_;
};

void SimulatedDisk::fail_operation(uint64_t number) {
  const std::lock_guard lock(mutex_);
  failing_ = number == 0 ? 0 : num_operations_ + number;
  is_power_cut_ = false;
}

void SimulatedDisk::cut_power_at(uint64_t number) {
  const std::lock_guard lock(mutex_);
  failing_ = num_operations_ + number;
  is_power_cut_ = true;
}

bool SimulatedDisk::has_failed() const {
  const std::lock_guard lock(mutex_);
  return failing_ > 0 && num_operations_ >= failing_;
}

void SimulatedDisk::lose_power(Unsynced kept) {
  const std::lock_guard lock(mutex_);
  const bool keeps_losses = kept == Unsynced::kOnlyWhatDestroys;
  failing_ = 0;
  num_bytes_ = 0;
  std::vector<NodePtr> folders = {root_};
  while (!folders.empty()) {
    const NodePtr folder = std::move(folders.back());
    folders.pop_back();
    if (keeps_losses) {
      std::erase_if(folder->synced_entries,
                    [&](const auto& entry) { return removed_.contains(entry.second); });
    }
    folder->entries = folder->synced_entries;
    for (const auto& [name, node] : folder->entries) {
      if (node->is_folder) folders.push_back(node);
      if (keeps_losses) {
        const auto changed = std::ranges::mismatch(node->synced_content, node->content).in1;
        node->synced_content.erase(changed, node->synced_content.end());
      }
      node->content = node->synced_content;
      num_bytes_ += node->content.size();
    }
  }
  removed_.clear();
}

Status SimulatedDisk::begin(std::string_view what, const std::string& path) {
  ++num_operations_;
  const bool is_down = is_power_cut_ && failing_ > 0 && num_operations_ > failing_;
  if (num_operations_ != failing_ && !is_down) return {};
  return io_error(what, path, "the operation failed");
}

Status SimulatedDisk::write(Node& node, size_t offset, ConstBytes data, const std::string& path) {
  Status status = begin("write", path);
  size_t num_written = status.ok() ? data.size() : data.size() / 2;
  if (num_written > capacity_bytes_ - num_bytes_) {
    num_written = capacity_bytes_ - num_bytes_;
    status = io_error("write", path, "no space left on the disk");
  }
  node.content.resize(offset);
  node.content += text_of(data.first(num_written));
  num_bytes_ += num_written;
  return status;
}

SimulatedDisk::NodePtr SimulatedDisk::find(std::string_view path) const {
  NodePtr node = root_;
  while (node != nullptr && !path.empty()) {
    const size_t slash = std::min(path.find('/'), path.size());
    const std::string name(path.substr(0, slash));
    path.remove_prefix(std::min(slash + 1, path.size()));
    if (name.empty() || name == ".") continue;
    const auto found = node->entries.find(name);
    node = found == node->entries.end() ? nullptr : found->second;
  }
  return node;
}

std::pair<SimulatedDisk::Entries*, std::string> SimulatedDisk::place_of(
    const std::string& path) const {
  const size_t slash = path.rfind('/');
  const bool has_folder = slash != std::string::npos;
  const NodePtr folder = has_folder ? find(std::string_view(path).substr(0, slash)) : root_;
  if (folder == nullptr || !folder->is_folder) return {nullptr, ""};
  return {&folder->entries, has_folder ? path.substr(slash + 1) : path};
}

SimulatedDisk::NodePtr SimulatedDisk::make_file(const std::string& path) {
  const auto [entries, name] = place_of(path);
  if (entries == nullptr) return nullptr;
  NodePtr& node = (*entries)[name];
  if (node == nullptr) node = std::make_shared<Node>();
  return node;
}

Result<std::unique_ptr<os::OutputFile>> SimulatedDisk::create(const std::string& path) {
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(begin("create", path));
  NodePtr node = make_file(path);
  if (node == nullptr || node->is_folder) return io_error("create", path, "no such file");
  num_bytes_ -= node->content.size();
  node->content.clear();
  return std::unique_ptr<os::OutputFile>(std::make_unique<Output>(*this, std::move(node), path));
}

Result<std::unique_ptr<os::SizedFile>> SimulatedDisk::create_sized(const std::string& path,
                                                                   size_t num_bytes) {
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(begin("create", path));
  const auto [entries, name] = place_of(path);
  const NodePtr former = find(path);
  if (entries == nullptr || (former != nullptr && former->is_folder)) {
    return io_error("create", path, "no such file");
  }
  if (former != nullptr) num_bytes_ -= former->content.size();
  entries->erase(name);
  if (num_bytes > capacity_bytes_ - num_bytes_) {
    return io_error("create", path, "no space left on the disk");
  }
  const NodePtr node = make_file(path);
  node->content.resize(num_bytes);
  num_bytes_ += num_bytes;
  return std::unique_ptr<os::SizedFile>(std::make_unique<Sized>(node));
}

Result<std::string> SimulatedDisk::create_beside(const std::string& path) {
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(begin("create a file beside", path));
  const std::string name = format("{}.{:06}", path, ++num_temporary_);
  if (make_file(name) == nullptr) return io_error("create a file beside", path, "no such folder");
  return name;
}

Result<std::string> SimulatedDisk::make_folder_beside(const std::string& path) {
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(begin("make a folder beside", path));
  const std::string name = format("{}.{:06}", path, ++num_temporary_);
  const NodePtr node = make_file(name);
  if (node == nullptr) return io_error("make a folder beside", path, "no such folder");
  node->is_folder = true;
  return name;
}

Result<std::unique_ptr<os::SharedFile>> SimulatedDisk::open_shared(const std::string& path) {
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(begin("open", path));
  NodePtr node = make_file(path);
  if (node == nullptr || node->is_folder) return io_error("open", path, "no such file");
  return std::unique_ptr<os::SharedFile>(std::make_unique<Shared>(*this, std::move(node), path));
}

Result<std::string> SimulatedDisk::read(const std::string& path, size_t max_bytes) {
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(begin("read", path));
  const NodePtr node = find(path);
  if (node == nullptr || node->is_folder) return io_error("open", path, "no such file");
  if (node->content.size() <= max_bytes) return node->content;
  return Error(
      ErrorCode::kInvalidArgument,
      format("{} has more than {} bytes, which is the limit for reading it", path, max_bytes));
}

Result<std::optional<os::FileKind>> SimulatedDisk::kind_of(const std::string& path) {
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(begin("look at", path));
  const NodePtr node = find(path);
  if (node == nullptr) return std::optional<os::FileKind>();
  return std::optional(node->is_folder ? os::FileKind::kFolder : os::FileKind::kFile);
}

Result<std::vector<std::string>> SimulatedDisk::list(const std::string& folder) {
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(begin("list", folder));
  const NodePtr node = find(folder);
  if (node == nullptr || !node->is_folder) return io_error("list", folder, "no such folder");
  std::vector<std::string> names;
  for (const auto& entry : node->entries) names.push_back(entry.first);
  return names;
}

Status SimulatedDisk::make_folder(const std::string& path) {
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(begin("make the folder", path));
  const auto [entries, name] = place_of(path);
  if (entries == nullptr || entries->contains(name)) {
    return io_error("make the folder", path, "it exists, or its folder does not");
  }
  (*entries)[name] = std::make_shared<Node>(Node{.is_folder = true});
  return {};
}

Status SimulatedDisk::sync(const std::string& path) {
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(begin("sync", path));
  const NodePtr node = find(path);
  if (node == nullptr) return io_error("sync", path, "no such file");
  node->synced_content = node->content;
  node->synced_entries = node->entries;
  return {};
}

Status SimulatedDisk::rename(const std::string& from, const std::string& to) {
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(begin("rename", from));
  const NodePtr node = find(from);
  const NodePtr target = find(to);
  const auto [to_entries, to_name] = place_of(to);
  const bool is_taken = target != nullptr && !target->entries.empty();
  if (node == nullptr || to_entries == nullptr || is_taken) {
    return io_error("rename", from, "no such file, or a folder with content has the new name");
  }
  if (target != nullptr) num_bytes_ -= target->content.size();
  const auto [from_entries, from_name] = place_of(from);
  from_entries->erase(from_name);
  (*to_entries)[to_name] = node;
  return {};
}

Status SimulatedDisk::exchange(const std::string& from, const std::string& to) {
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(begin("exchange", from));
  if (find(from) == nullptr || find(to) == nullptr) {
    return io_error("exchange", from, "no such file");
  }
  const auto [from_entries, from_name] = place_of(from);
  const auto [to_entries, to_name] = place_of(to);
  std::swap((*from_entries)[from_name], (*to_entries)[to_name]);
  return {};
}

Status SimulatedDisk::remove(const std::string& path) {
  const std::lock_guard lock(mutex_);
  CADRE_RETURN_IF_ERROR(begin("remove", path));
  const NodePtr node = find(path);
  if (node == nullptr || !node->entries.empty()) {
    return io_error("remove", path, "no such file, or the folder is not empty");
  }
  num_bytes_ -= node->content.size();
  const auto [entries, name] = place_of(path);
  entries->erase(name);
  removed_.insert(node);
  return {};
}

}  // namespace cadre::sim
