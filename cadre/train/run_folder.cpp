#include "cadre/train/run_folder.h"

#include <unistd.h>

#include <filesystem>
#include <span>
#include <system_error>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/os/files/file.h"
#include "cadre/os/host/host_info.h"
#include "cadre/train/snapshots/train_state.h"

namespace cadre::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLockName = ".lock";
constexpr size_t kMaxOwnerBytes = 4096;

void check(const std::error_code& error, const std::string& what) {
  if (error) {
    throw Error(ErrorCode::kUnavailable, cadre::format("{}: {}", what, error.message()));
  }
}

bool is_used(const std::string& folder) {
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->path().filename() != kLockName) return true;
  }
  return false;
}

bool lies_in(const std::optional<std::string>& snapshot, const std::string& folder) {
  std::error_code error;
  return snapshot && fs::equivalent(fs::path(*snapshot) / "..", folder, error);
}

std::string move_aside(const std::string& folder) {
  std::string target;
  std::error_code error;
  int number = 1;
  do {
    target = cadre::format("{}.{}", folder, number++);
  } while (fs::exists(target, error));
  fs::rename(folder, target, error);
  check(error, cadre::format("move {} to {}", folder, target));
  fs::remove(fs::path(target) / kLockName, error);
  return target;
}

[[noreturn]] void refuse_taken(const std::string& folder) {
  const auto owner = os::read_file(folder + "/" + kLockName, kMaxOwnerBytes);
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("another run writes to {} ({}): end it, or give this one another "
                            "run.name",
                            folder, owner.ok() ? *owner : "unknown"));
}

std::string own_name() {
  return cadre::format("pid {} on {}", ::getpid(), os::read_host_info().name);
}

os::LockedFile take(const std::string& path, const std::optional<std::string>& snapshot,
                    std::string& moved_to) {
  while (true) {
    std::error_code error;
    fs::create_directories(path, error);
    check(error, cadre::format("create {}", path));
    os::LockedFile lock =
        os::LockedFile::open(path + "/" + kLockName, os::LockedFile::kReadableByAll)
            .value_or_throw();
    // On a file system without locks nobody is refused.
    const Result<bool> is_ours = lock.try_lock();
    if (is_ours.ok() && !*is_ours) refuse_taken(path);
    if (!lock.is_named()) continue;  // the previous owner has just ended, or its folder was renamed
    if (lies_in(snapshot, path) || !is_used(path)) return lock;
    moved_to = move_aside(path);
  }
}

// A damaged snapshot has no loss.
std::optional<double> readable_best_loss(const std::string& snapshot) {
  try {
    return best_loss_in(snapshot);
  } catch (const Error&) {
    return std::nullopt;
  }
}

// The best snapshot is the first one that knows its loss.
void mark_best_of(SnapshotFolder& snapshots, double loss) {
  for (const int64_t step : snapshots.steps()) {
    if (readable_best_loss(snapshots.path_of(step)) != loss) continue;
    snapshots.mark_best(step);
    return;
  }
}

}  // namespace

std::optional<std::string> find_snapshot(const RunConfig& run, const SnapshotFolder& snapshots) {
  if (run.resume == "none") return std::nullopt;
  if (run.resume == "auto") return snapshots.latest();
  if (run.resume == "best") {
    if (auto best = snapshots.best()) return best;
    throw Error(
        ErrorCode::kInvalidArgument,
        "run.resume = best: no snapshot was marked as the best; set run.keep_best to mark them");
  }
  if (fs::exists(run.resume + "/state.json") || fs::exists(run.resume + "/manifest.json")) {
    return (fs::path(run.resume) / "").parent_path().string();  // without a slash at the end
  }
  // The folder of a run is accepted, too.
  if (const auto latest = SnapshotFolder(run.resume).latest()) return latest;
  throw Error(
      ErrorCode::kInvalidArgument,
      cadre::format("run.resume = {}: no snapshot there; expected none, auto, best, or a folder "
                    "with state.json or manifest.json",
                    run.resume));
}

std::string metrics_path_of(const std::string& run_path) {
  return run_path + "/metrics.jsonl";
}

std::optional<std::string> set_abandoned_aside(SnapshotFolder& snapshots,
                                               const BranchPoint& branch) {
  const bool had_best = snapshots.best().has_value();
  const std::optional<std::string> folder = snapshots.set_aside_after(branch.step);
  if (!folder) return std::nullopt;
  const std::string metrics = metrics_path_of(snapshots.run_folder());
  std::error_code error;
  if (fs::exists(metrics, error)) {
    fs::copy_file(metrics, metrics_path_of(*folder), fs::copy_options::overwrite_existing, error);
    check(error, cadre::format("copy {} to {}", metrics, *folder));
  }
  if (had_best && !snapshots.best() && branch.best_loss) mark_best_of(snapshots, *branch.best_loss);
  return folder;
}

RunFolder::RunFolder(const std::string& path, const std::optional<std::string>& snapshot)
    : lock_(take(path, snapshot, moved_to_)) {
  const std::string owner = own_name();
  // If the owner cannot be written because the disk is full, other runs are still refused, without
  // its name.
  (void)lock_.truncate(0);
  (void)lock_.append_at(0, std::as_bytes(std::span(owner)));
}

RunFolder::~RunFolder() {
  // Before the lock is released: another process that has opened the file meanwhile finds that it
  // was unlinked.
  (void)lock_.remove();
}

}  // namespace cadre::train
