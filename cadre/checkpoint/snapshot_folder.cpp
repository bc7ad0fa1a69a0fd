#include "cadre/checkpoint/snapshot_folder.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/os/files/durable_file.h"
#include "cadre/os/files/native_file_system.h"

namespace cadre {
namespace {

constexpr size_t kMaxPointerBytes = 4096;
constexpr std::string_view kNamePrefix = "step-";

std::string name_of(int64_t step) {
  return cadre::format("{}{:06}", kNamePrefix, step);
}

// nullopt for other names.
std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kNamePrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kNamePrefix.size());
  int64_t step = 0;
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (parsed.ec != std::errc() || parsed.ptr != digits.data() + digits.size()) return std::nullopt;
  return step;
}

std::string in_folder(const std::string& folder, std::string_view name) {
  return cadre::format("{}/{}", folder, name);
}

// Empty if there is no folder.
Result<std::vector<std::string>> names_in(os::FileSystem& files, const std::string& folder) {
  const auto kind = files.kind_of(folder);
  if (!kind.ok()) return kind.error();
  if (!*kind) return std::vector<std::string>();
  return files.list(folder);
}

// Removes the folders of earlier attempts at this snapshot: by a run that was killed while writing,
// or by a rank that may still be writing and then fails because its folder is removed.
Status remove_all_with_prefix(os::FileSystem& files, const std::string& folder,
                              const std::string& prefix) {
  const auto names = names_in(files, folder);
  if (!names.ok()) return names.error();
  for (const std::string& name : *names) {
    if (name.starts_with(prefix)) {
      CADRE_RETURN_IF_ERROR(os::remove_all(files, in_folder(folder, name)));
    }
  }
  return {};
}

// A new folder with a unique name, which the destructor removes if it has the name still.
class AttemptFolder {
 public:
  AttemptFolder(os::FileSystem& files, const std::string& run_folder, const std::string& prefix)
      : files_(files) {
    os::make_folders(files, run_folder).value_or_throw();
    remove_all_with_prefix(files, run_folder, prefix).value_or_throw();
    path_ = files.make_folder_beside(in_folder(run_folder, prefix)).value_or_throw();
  }
  ~AttemptFolder() { (void)os::remove_all(files_, path_); }  // the next attempt tries it again
  AttemptFolder(const AttemptFolder&) = delete;
  AttemptFolder& operator=(const AttemptFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  os::FileSystem& files_;
  std::string path_;
};

}  // namespace

SnapshotFolder::SnapshotFolder(std::string run_folder, os::FileSystem* files)
    : run_folder_(std::move(run_folder)),
      files_(files != nullptr ? std::shared_ptr<os::FileSystem>(files, [](os::FileSystem*) {})
                              : std::make_shared<os::NativeFileSystem>()) {}

std::string SnapshotFolder::path_of(int64_t step) const {
  return in_folder(run_folder_, name_of(step));
}

void SnapshotFolder::save(int64_t step,
                          const std::function<void(const std::string&)>& write_files) {
  try {
    write_and_publish(step, write_files);
  } catch (const Error& error) {
    throw error.with_context(cadre::format("snapshot of step {}", step));
  }
}

void SnapshotFolder::write_and_publish(int64_t step,
                                       const std::function<void(const std::string&)>& write_files) {
  const AttemptFolder attempt(*files_, run_folder_, cadre::format(".{}.tmp", name_of(step)));
  write_files(attempt.path());
  const std::string target = path_of(step);
  if (files_->kind_of(target).value_or_throw()) {
    os::exchange_paths(*files_, attempt.path(), target).value_or_throw();
    os::remove_all(*files_, attempt.path()).value_or_throw();  // the replaced snapshot
  } else {
    os::rename_path(*files_, attempt.path(), target).value_or_throw();
  }
  write_pointer("latest", step);
}

void SnapshotFolder::write_pointer(std::string_view pointer, int64_t step) {
  const std::string name = name_of(step) + "\n";
  os::replace_file(*files_, in_folder(run_folder_, pointer), std::as_bytes(std::span(name)))
      .value_or_throw();
}

std::optional<std::string> SnapshotFolder::latest() const {
  if (auto named = folder_named_by("latest")) return named;
  const std::vector<int64_t> all = steps();
  if (all.empty()) return std::nullopt;
  return path_of(all.back());
}

std::optional<int64_t> SnapshotFolder::latest_step() const {
  const auto folder = latest();
  return folder ? step_of_folder(*folder) : std::nullopt;
}

std::optional<int64_t> SnapshotFolder::step_of_folder(const std::string& path) {
  return step_of(std::filesystem::path(path).filename().string());
}

std::vector<int64_t> SnapshotFolder::steps() const {
  std::vector<int64_t> steps;
  const auto names = names_in(*files_, run_folder_);
  if (!names.ok()) return steps;
  for (const std::string& name : *names) {
    const auto step = step_of(name);
    if (step && is_folder(in_folder(run_folder_, name))) steps.push_back(*step);
  }
  std::ranges::sort(steps);
  return steps;
}

bool SnapshotFolder::is_folder(const std::string& path) const {
  const auto kind = files_->kind_of(path);
  if (!kind.ok()) return false;
  return *kind == os::FileKind::kFolder ||
         (*kind == os::FileKind::kLink && files_->list(path).ok());
}

// A snapshot is renamed before it is removed, so that no partial one has its name.
void SnapshotFolder::keep_last(size_t count) {
  std::vector<int64_t> removed = steps();
  removed.resize(removed.size() - std::min(count, removed.size()));
  for (const int64_t step : removed) {
    const std::string path = path_of(step);
    if (path == latest() || path == best()) continue;
    const std::string prefix = cadre::format(".{}.tmp", name_of(step));
    remove_all_with_prefix(*files_, run_folder_, prefix).value_or_throw();
    os::rename_path(*files_, path, in_folder(run_folder_, prefix + ".removed")).value_or_throw();
    remove_all_with_prefix(*files_, run_folder_, prefix).value_or_throw();
  }
}

std::optional<std::string> SnapshotFolder::set_aside_after(int64_t step) {
  std::vector<int64_t> later = steps();
  std::erase_if(later, [step](int64_t other) { return other <= step; });
  if (later.empty()) return std::nullopt;
  write_pointer("latest", step);
  int number = 1;
  std::string target;
  do {
    target = in_folder(run_folder_, cadre::format("abandoned.{}", number++));
  } while (files_->kind_of(target).value_or_throw());
  os::make_folders(*files_, target).value_or_throw();
  for (const int64_t other : later) {
    os::rename_path(*files_, path_of(other), in_folder(target, name_of(other))).value_or_throw();
  }
  files_->sync(run_folder_).value_or_throw();
  return target;
}

void SnapshotFolder::mark_best(int64_t step) {
  write_pointer("best", step);
}

std::optional<std::string> SnapshotFolder::best() const {
  return folder_named_by("best");
}

std::optional<std::string> SnapshotFolder::folder_named_by(const std::string& pointer) const {
  const auto name = files_->read(in_folder(run_folder_, pointer), kMaxPointerBytes);
  if (!name.ok()) return std::nullopt;
  const std::string folder = name->substr(0, name->find('\n'));
  if (!step_of(folder)) return std::nullopt;
  const std::string path = in_folder(run_folder_, folder);
  if (!is_folder(path)) return std::nullopt;
  return path;
}

}  // namespace cadre
