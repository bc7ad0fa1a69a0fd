#include "cadre/train/checkpoint/snapshot_folder.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/durable_file.h"
#include "cadre/core/os/files/native_file_system.h"
#include "cadre/train/checkpoint/on_file_system.h"

namespace cadre {
namespace {

constexpr size_t kMaxPointerBytes = 4096;
constexpr std::string_view kNamePrefix = "step-";
constexpr std::string_view kLatestName = "latest";
// The temporary name of the file `latest`. A save renames the snapshot's folder into place, then
// this file to `latest`. If the folder and this file both exist, the process was killed between the
// two renames.
constexpr std::string_view kNextLatestName = ".latest.next";

std::string name_of(int64_t step) {
  return cadre::format("{}{:06}", kNamePrefix, step);
}

// Returns nullopt for names that path_of() does not produce, also for another spelling of a step,
// such as "step-7" for "step-000007".
std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kNamePrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kNamePrefix.size());
  int64_t step = 0;
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (parsed.ec != std::errc() || name_of(step) != name) return std::nullopt;
  return step;
}

std::string in_folder(const std::string& folder, std::string_view name) {
  return cadre::format("{}/{}", folder, name);
}

// Returns an empty list if the folder does not exist.
Result<std::vector<std::string>> names_in(os::FileSystem& files, const std::string& folder) {
  const auto kind = files.kind_of(folder);
  if (!kind.ok()) return kind.error();
  if (!*kind || *kind == os::FileKind::kFile) return std::vector<std::string>();
  return files.list(folder);
}

constexpr std::string_view kRemovedSuffix = ".removed";

// Renames the folder before it removes the files in it. Otherwise another process that still writes
// to the folder could publish it while some of its files are already gone.
Status remove_as_whole(os::FileSystem& files, const std::string& path) {
  const auto kind = files.kind_of(path);
  if (!kind.ok()) return kind.error();
  if (!*kind) return {};
  if (*kind != os::FileKind::kFolder || path.ends_with(kRemovedSuffix)) {
    return os::remove_all(files, path);
  }
  const std::string removed = cadre::format("{}{}", path, kRemovedSuffix);
  const Status renamed = files.rename(path, removed);
  if (renamed.ok()) return os::remove_all(files, removed);
  const auto now = files.kind_of(path);
  // The rename failed: another process has published or removed the folder since kind_of().
  return now.ok() && !*now ? Status() : renamed;
}

// Removes the temporary folders of earlier attempts to save this snapshot. They were left by a run
// that was killed while it saved. One may also belong to a rank that is still writing; its save
// then fails because its folder is removed.
Status remove_all_with_prefix(os::FileSystem& files, const std::string& folder,
                              const std::string& prefix) {
  const auto names = names_in(files, folder);
  if (!names.ok()) return names.error();
  for (const std::string& name : *names) {
    if (name.starts_with(prefix)) {
      CADRE_RETURN_IF_ERROR(remove_as_whole(files, in_folder(folder, name)));
    }
  }
  return {};
}

// A new temporary folder with a unique name. The destructor removes it if it was not renamed.
class AttemptFolder {
 public:
  AttemptFolder(os::FileSystem& files, const std::string& run_folder, const std::string& prefix)
      : files_(files) {
    os::make_folders(files, run_folder).value_or_throw();
    remove_all_with_prefix(files, run_folder, prefix).value_or_throw();
    path_ = files.make_folder_beside(in_folder(run_folder, prefix)).value_or_throw();
  }
  // The result is ignored: the next attempt to save this step removes what is left.
  ~AttemptFolder() { (void)os::remove_all(files_, path_); }
  AttemptFolder(const AttemptFolder&) = delete;
  AttemptFolder& operator=(const AttemptFolder&) = delete;

  const std::string& path() const { return path_; }

  // Returns a clearer error if the file system's error was caused by another process that removed
  // the folder.
  Status explained(const Status& status) const {
    if (status.ok() || status.error().code() != ErrorCode::kUnavailable) return status;
    const auto kind = files_.kind_of(path_);
    if (!kind.ok() || *kind) return status;
    return Error(ErrorCode::kUnavailable,
                 cadre::format("{} was removed while it was written, as another save of the same "
                               "step in the same run folder does; let only one program and one "
                               "saver at a time write to a run folder",
                               path_));
  }

 private:
  os::FileSystem& files_;
  std::string path_;
};

// The future content of `latest`, in a temporary file that is written and synced before the
// snapshot is published. After that, only a rename is left to do. The destructor removes the file
// unless the snapshot was published.
class NextLatest {
 public:
  NextLatest(os::FileSystem& files, const std::string& run_folder, std::string_view file_name,
             int64_t step)
      : files_(files),
        run_folder_(run_folder),
        path_(in_folder(run_folder, file_name)),
        target_(in_folder(run_folder, kLatestName)),
        content_(name_of(step) + "\n") {
    const std::array<ConstBytes, 1> pieces = {std::as_bytes(std::span(content_))};
    os::write_file(files_, path_, pieces).value_or_throw();
    files_.sync(run_folder).value_or_throw();
  }
  ~NextLatest() {
    if (!is_published_) (void)files_.remove(path_);  // ignored: the next save replaces the file
  }
  NextLatest(const NextLatest&) = delete;
  NextLatest& operator=(const NextLatest&) = delete;

  void snapshot_is_published() { is_published_ = true; }
  void become_latest() {
    const Status renamed = files_.rename(path_, target_);
    if (!renamed.ok()) {
      // Another save in this run folder may have renamed the file to `latest`, or removed it after
      // a failure.
      if (files_.kind_of(path_).value_or_throw()) renamed.value_or_throw();
      os::replace_file(files_, target_, std::as_bytes(std::span(content_))).value_or_throw();
    }
    files_.sync(run_folder_).value_or_throw();
  }

 private:
  os::FileSystem& files_;
  const std::string run_folder_;
  const std::string path_;
  const std::string target_;
  const std::string content_;
  bool is_published_ = false;
};

}  // namespace

SnapshotFolder::SnapshotFolder(std::string run_folder)
    : SnapshotFolder(std::move(run_folder), std::make_shared<os::NativeFileSystem>()) {}

SnapshotFolder::SnapshotFolder(std::string run_folder, std::shared_ptr<os::FileSystem> files)
    : run_folder_(std::move(run_folder)), files_(std::move(files)) {}

SnapshotFolder snapshot_folder_on(os::FileSystem& files, std::string run_folder) {
  return {std::move(run_folder), std::shared_ptr<os::FileSystem>(&files, [](os::FileSystem*) {})};
}

os::FileSystem& files_of(const SnapshotFolder& folder) {
  return *folder.files_;
}

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
  finish_publishing();
  const AttemptFolder attempt(*files_, run_folder_, cadre::format(".{}.tmp", name_of(step)));
  const auto write = [&]() -> Status {
    try {
      write_files(attempt.path());
    } catch (const Error& error) {
      return error;
    }
    return files_->sync(attempt.path());
  };
  attempt.explained(write()).value_or_throw();
  const std::string target = path_of(step);
  const bool is_replacement = files_->kind_of(target).value_or_throw().has_value();
  // If the save replaces a snapshot, the folder of this step holds the old one until both folders
  // are exchanged. After a crash before the exchange, latest() must not return the old snapshot as
  // the new one.
  const bool names_another = is_replacement && latest() != target;
  NextLatest next(
      *files_, run_folder_,
      names_another ? cadre::format(".{}.tmp.latest", name_of(step)) : std::string(kNextLatestName),
      step);
  attempt
      .explained(is_replacement ? files_->exchange(attempt.path(), target)
                                : files_->rename(attempt.path(), target))
      .value_or_throw();
  next.snapshot_is_published();
  files_->sync(run_folder_).value_or_throw();
  next.become_latest();
}

// If a killed process has left kNextLatestName, renames it to `latest`, before the next save
// overwrites it.
void SnapshotFolder::finish_publishing() {
  if (!folder_named_by(kNextLatestName)) return;
  const std::string file = in_folder(run_folder_, kNextLatestName);
  const Status renamed = os::rename_path(*files_, file, in_folder(run_folder_, kLatestName));
  // If the file is gone, another save in this run folder has renamed it since; that is no error.
  if (!renamed.ok() && files_->kind_of(file).value_or_throw()) renamed.value_or_throw();
}

void SnapshotFolder::write_pointer(std::string_view pointer, int64_t step) {
  const std::string name = name_of(step) + "\n";
  os::replace_file(*files_, in_folder(run_folder_, pointer), std::as_bytes(std::span(name)))
      .value_or_throw();
}

std::optional<std::string> SnapshotFolder::latest() const {
  if (auto published = folder_named_by(kNextLatestName)) return published;
  if (auto named = folder_named_by(kLatestName)) return named;
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
  for (const std::string& name : names_in(*files_, run_folder_).value_or_throw()) {
    const auto step = step_of(name);
    if (step && is_folder(in_folder(run_folder_, name))) steps.push_back(*step);
  }
  std::ranges::sort(steps);
  return steps;
}

bool SnapshotFolder::is_folder(const std::string& path) const {
  const auto kind = files_->kind_of(path).value_or_throw();
  return kind == os::FileKind::kFolder || (kind == os::FileKind::kLink && files_->list(path).ok());
}

// Each snapshot is renamed before its files are removed, so that no incomplete folder has the name
// of a step.
void SnapshotFolder::keep_last(size_t count) {
  std::vector<int64_t> removed = steps();
  removed.resize(removed.size() - std::min(count, removed.size()));
  for (const int64_t step : removed) {
    const std::string path = path_of(step);
    if (path == latest() || path == best()) continue;
    const std::string prefix = cadre::format(".{}.tmp", name_of(step));
    remove_all_with_prefix(*files_, run_folder_, prefix).value_or_throw();
    os::rename_path(*files_, path,
                    in_folder(run_folder_, cadre::format("{}{}", prefix, kRemovedSuffix)))
        .value_or_throw();
    remove_all_with_prefix(*files_, run_folder_, prefix).value_or_throw();
  }
}

std::optional<std::string> SnapshotFolder::set_aside_after(int64_t step) {
  std::vector<int64_t> later = steps();
  std::erase_if(later, [step](int64_t other) { return other <= step; });
  if (later.empty()) return std::nullopt;
  finish_publishing();
  write_pointer(kLatestName, step);
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

std::optional<std::string> SnapshotFolder::folder_named_by(std::string_view pointer) const {
  const std::string file = in_folder(run_folder_, pointer);
  if (!files_->kind_of(file).value_or_throw()) return std::nullopt;
  const auto name = files_->read(file, kMaxPointerBytes);
  if (!name.ok()) {
    // Reading failed because `file` is not a regular file, or because another save has renamed it
    // since.
    const auto kind = files_->kind_of(file).value_or_throw();
    if (kind != os::FileKind::kFile || name.error().code() == ErrorCode::kInvalidArgument) {
      return std::nullopt;
    }
    throw name.error();
  }
  const std::string folder = name->substr(0, name->find('\n'));
  if (!step_of(folder)) return std::nullopt;
  const std::string path = in_folder(run_folder_, folder);
  if (!is_folder(path)) return std::nullopt;
  return path;
}

}  // namespace cadre
