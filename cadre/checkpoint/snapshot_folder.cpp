#include "cadre/checkpoint/snapshot_folder.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/os/files/durable_file.h"
#include "cadre/os/files/file.h"
#include "cadre/os/proc/temporary_folder.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;

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

Status to_status(const std::error_code& error, const std::string& what) {
  if (!error) return {};
  return Error(ErrorCode::kUnavailable, cadre::format("{}: {}", what, error.message()));
}

// Removes the folders of earlier attempts at this snapshot: by a run that was killed while writing,
// or by a rank that may still be writing and then fails because its folder is removed.
Status remove_all_with_prefix(const std::string& folder, const std::string& prefix) {
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (!entry->path().filename().string().starts_with(prefix)) continue;
    std::error_code failure;
    fs::remove_all(entry->path(), failure);
    CADRE_RETURN_IF_ERROR(to_status(failure, cadre::format("remove {}", entry->path().string())));
  }
  return to_status(error, cadre::format("list {}", folder));
}

// A new folder with a unique name.
Result<std::unique_ptr<os::TemporaryFolder>> make_attempt_folder(const std::string& run_folder,
                                                                 const std::string& prefix) {
  std::error_code error;
  fs::create_directories(run_folder, error);
  CADRE_RETURN_IF_ERROR(to_status(error, cadre::format("create {}", run_folder)));
  CADRE_RETURN_IF_ERROR(remove_all_with_prefix(run_folder, prefix));
  auto made = os::TemporaryFolder::make(run_folder, prefix + ".");
  if (!made.ok()) return made.error();
  // A snapshot has the permissions of other folders.
  fs::permissions((*made)->path(), static_cast<fs::perms>(0755), error);
  CADRE_RETURN_IF_ERROR(to_status(error, cadre::format("make {} readable", (*made)->path())));
  return made;
}

}  // namespace

SnapshotFolder::SnapshotFolder(std::string run_folder) : run_folder_(std::move(run_folder)) {}

std::string SnapshotFolder::path_of(int64_t step) const {
  return cadre::format("{}/{}", run_folder_, name_of(step));
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
  const std::unique_ptr<os::TemporaryFolder> attempt =
      make_attempt_folder(run_folder_, cadre::format(".{}.tmp", name_of(step))).value_or_throw();
  const std::string& temporary = attempt->path();
  write_files(temporary);
  const std::string target = path_of(step);
  std::error_code error;
  if (fs::exists(target, error)) {
    os::exchange_paths(temporary, target).value_or_throw();
    fs::remove_all(temporary, error);  // the replaced snapshot
    to_status(error, cadre::format("remove {}", temporary)).value_or_throw();
  } else {
    os::rename_path(temporary, target).value_or_throw();
  }
  const std::string name = name_of(step) + "\n";
  os::replace_file(run_folder_ + "/latest", std::as_bytes(std::span(name))).value_or_throw();
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
  return step_of(fs::path(path).filename().string());
}

std::vector<int64_t> SnapshotFolder::steps() const {
  std::vector<int64_t> steps;
  std::error_code error;
  for (fs::directory_iterator entry(run_folder_, error), end; !error && entry != end;
       entry.increment(error)) {
    const auto step = step_of(entry->path().filename().string());
    std::error_code unknown;
    if (step && entry->is_directory(unknown)) steps.push_back(*step);
  }
  std::ranges::sort(steps);
  return steps;
}

// A snapshot is renamed before it is removed, so that no partial one has its name.
void SnapshotFolder::keep_last(size_t count) {
  std::vector<int64_t> removed = steps();
  removed.resize(removed.size() - std::min(count, removed.size()));
  for (const int64_t step : removed) {
    const std::string path = path_of(step);
    if (path == latest() || path == best()) continue;
    const std::string prefix = cadre::format(".{}.tmp", name_of(step));
    remove_all_with_prefix(run_folder_, prefix).value_or_throw();
    os::rename_path(path, cadre::format("{}/{}.removed", run_folder_, prefix)).value_or_throw();
    remove_all_with_prefix(run_folder_, prefix).value_or_throw();
  }
}

void SnapshotFolder::mark_best(int64_t step) {
  const std::string name = name_of(step) + "\n";
  os::replace_file(run_folder_ + "/best", std::as_bytes(std::span(name))).value_or_throw();
}

std::optional<std::string> SnapshotFolder::best() const {
  return folder_named_by("best");
}

std::optional<std::string> SnapshotFolder::folder_named_by(const std::string& pointer) const {
  const auto name = os::read_file(cadre::format("{}/{}", run_folder_, pointer), kMaxPointerBytes);
  if (!name.ok()) return std::nullopt;
  const std::string folder = name->substr(0, name->find('\n'));
  if (!step_of(folder)) return std::nullopt;
  const std::string path = cadre::format("{}/{}", run_folder_, folder);
  std::error_code error;
  if (!fs::is_directory(path, error)) return std::nullopt;
  return path;
}

}  // namespace cadre
