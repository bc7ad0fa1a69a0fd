#include "cadre/train/trainer/run/run_folder.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/host/host_info.h"
#include "cadre/train/trainer/snapshots/run_origin.h"
#include "cadre/train/trainer/snapshots/train_state.h"

namespace cadre::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLockName = ".lock";
constexpr const char* kJobName = "job";
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

bool are_equivalent(const std::string& a, const std::string& b) {
  std::error_code error;
  return fs::equivalent(a, b, error);
}

// Returns the snapshot's path relative to the folder, such as "abandoned.1/step-000040"; nullopt if
// the snapshot is not inside the folder.
std::optional<std::string> path_below(const std::string& snapshot, const std::string& folder) {
  std::error_code error;
  const auto below = [](const fs::path& path, const fs::path& base) -> std::optional<std::string> {
    const fs::path relative = path.lexically_relative(base);
    if (relative.empty() || relative == "." || *relative.begin() == "..") return std::nullopt;
    return relative.string();
  };
  // A symbolic link inside the folder counts as inside, wherever it leads. So does a path whose
  // target is inside the folder, if a link elsewhere names it.
  if (auto path = below(fs::absolute(snapshot, error).lexically_normal(),
                        fs::absolute(folder, error).lexically_normal())) {
    return path;
  }
  return below(fs::weakly_canonical(snapshot, error), fs::weakly_canonical(folder, error));
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

// Returns those of the folder and its parents that do not exist, the deepest first.
std::vector<fs::path> missing_folders(const std::string& path) {
  std::vector<fs::path> missing;
  std::error_code error;
  for (fs::path folder = fs::absolute(path, error).lexically_normal();
       folder.has_relative_path() && !fs::exists(folder, error); folder = folder.parent_path()) {
    missing.push_back(folder);
  }
  return missing;
}

// Returns the best loss that the snapshot records; nullopt also if the snapshot is damaged.
std::optional<double> readable_best_loss(const std::string& snapshot) {
  try {
    return best_loss_in(snapshot);
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Marks as best the first snapshot that records this loss.
void mark_best_of(SnapshotFolder& snapshots, double loss) {
  for (const int64_t step : snapshots.steps()) {
    if (readable_best_loss(snapshots.path_of(step)) != loss) continue;
    snapshots.mark_best(step);
    return;
  }
}

// Does nothing if `from` has no metrics file.
void copy_metrics(const std::string& from, const std::string& to) {
  const std::string source = metrics_path_of(from);
  std::error_code error;
  if (!fs::exists(source, error)) return;
  fs::copy_file(source, metrics_path_of(to), fs::copy_options::overwrite_existing, error);
  check(error, cadre::format("copy {} to {}", source, to));
}

// Moves the snapshots of later steps than `step` to a new folder inside the run's folder, and
// copies the metrics there. Returns that folder; nullopt if there are no later snapshots.
std::optional<std::string> set_later_aside(SnapshotFolder& snapshots, int64_t step,
                                           const std::optional<double>& best_loss) {
  const bool had_best = snapshots.best().has_value();
  const std::optional<std::string> folder = snapshots.set_aside_after(step);
  if (!folder) return std::nullopt;
  copy_metrics(snapshots.run_folder(), *folder);
  if (had_best && !snapshots.best() && best_loss) mark_best_of(snapshots, *best_loss);
  return folder;
}

// Is called if a run continues from a snapshot inside its folder that is not its own, for example
// from abandoned.1. After a crash at any later time, run.resume=auto continues from that snapshot
// again; after a crash before the first record is written, the folder is unchanged.
std::optional<std::string> continue_from_below(SnapshotFolder& snapshots, const BranchPoint& start,
                                               const std::string& relative) {
  const std::string& run_path = snapshots.run_folder();
  RunOrigin origin = {.step = start.step, .abandoned = {}, .snapshot = relative};
  int64_t earlier = start.step - 1;
  for (const int64_t step : snapshots.steps()) {
    if (step < start.step) earlier = step;
    if (step >= start.step) origin.abandoned.push_back(step);
  }
  std::optional<std::string> folder;
  if (!origin.abandoned.empty()) {
    origin.write(run_path);
    folder = set_later_aside(snapshots, earlier, start.best_loss);
    origin.abandoned.clear();
    const std::string branch = fs::path(start.snapshot).parent_path().string();
    if (!are_equivalent(branch, run_path)) copy_metrics(branch, run_path);
  }
  origin.write(run_path);
  return folder;
}

}  // namespace

std::optional<std::string> find_snapshot(const RunConfig& run, const SnapshotFolder& snapshots) {
  if (run.resume == "none") return std::nullopt;
  if (run.resume == "auto") return followed_or_latest(snapshots);
  if (run.resume == "best") {
    if (auto best = snapshots.best()) return best;
    throw Error(
        ErrorCode::kInvalidArgument,
        "run.resume = best: no snapshot was marked as the best; set run.keep_best to mark them");
  }
  if (fs::exists(run.resume + "/state.json") || fs::exists(run.resume + "/manifest.json")) {
    return (fs::path(run.resume) / "").parent_path().string();  // removes a trailing slash
  }
  // The path may also be the folder of a run, which stands for its latest snapshot.
  if (const auto latest = followed_or_latest(SnapshotFolder(run.resume))) return latest;
  throw Error(
      ErrorCode::kInvalidArgument,
      cadre::format("run.resume = {}: no snapshot there; expected none, auto, best, or a folder "
                    "with state.json or manifest.json",
                    run.resume));
}

bool is_run_of_job(const std::string& run_path, const std::string& job) {
  const auto recorded = os::read_file(cadre::format("{}/{}", run_path, kJobName), kMaxOwnerBytes);
  return recorded.ok() && !job.empty() && *recorded == job;
}

std::string metrics_path_of(const std::string& run_path) {
  return run_path + "/metrics.jsonl";
}

RunFolder::RunFolder(const std::string& path) : path_(path) {
  lock();
}

void RunFolder::lock() {
  while (true) {
    std::vector<fs::path> missing = missing_folders(path_);
    std::error_code error;
    fs::create_directories(path_, error);
    check(error, cadre::format("create {}", path_));
    lock_.emplace(os::LockedFile::open(path_ + "/" + kLockName, os::LockedFile::kReadableByAll)
                      .value_or_throw());
    // If the file system has no locks, try_lock() fails and the run goes on without one.
    const Result<bool> is_ours = lock_->try_lock();
    if (is_ours.ok() && !*is_ours) {
      lock_.reset();
      refuse_taken(path_);
    }
    // The lock file was unlinked since it was opened: its owner has just ended, or the folder was
    // renamed. Try again.
    if (!lock_->is_named()) continue;
    if (!missing.empty()) created_ = std::move(missing);
    break;
  }
  const std::string owner = own_name();
  // Errors are ignored: if the owner's name cannot be written because the disk is full, other runs
  // still get the error, but without that name.
  (void)lock_->truncate(0);
  (void)lock_->append_at(0, std::as_bytes(std::span(owner)));
}

RunFolder::Moved RunFolder::begin(const std::optional<BranchPoint>& start) {
  SnapshotFolder snapshots(path_);
  Moved moved;
  if (start && are_equivalent(start->snapshot, snapshots.path_of(start->step))) {
    if (!start->has_steps_left) return moved;
    std::error_code error;
    fs::remove(RunOrigin::path_of(path_), error);
    check(error, cadre::format("remove {}", RunOrigin::path_of(path_)));
    moved.abandoned = set_later_aside(snapshots, start->step, start->best_loss);
    return moved;
  }
  if (start) {
    const std::optional<std::string> followed = followed_origin(snapshots);
    const std::optional<std::string> below = path_below(start->snapshot, path_);
    const bool is_followed = followed && are_equivalent(*followed, start->snapshot);
    if (below && start->has_steps_left) {
      moved.abandoned = continue_from_below(snapshots, *start, *below);
    }
    if (below || is_followed) return moved;
  }
  while (is_used(path_)) {
    moved.earlier_run = move_aside(path_);
    lock();
  }
  if (start) {
    std::error_code error;
    const fs::path origin = fs::absolute(start->snapshot, error).lexically_normal();
    RunOrigin{.step = start->step, .abandoned = {}, .snapshot = origin.string()}.write(path_);
  }
  return moved;
}

void RunFolder::record_job(const std::string& job) {
  const Status written =
      os::replace_file(cadre::format("{}/{}", path_, kJobName), std::as_bytes(std::span(job)));
  if (!written.ok()) throw written.error();
}

void RunFolder::forget_job() {
  const fs::path record = fs::path(path_) / kJobName;
  std::error_code error;
  fs::remove(record, error);
  check(error, cadre::format("remove {}", record.string()));
}

RunFolder::~RunFolder() {
  // The file is unlinked before the lock is released. A process that opened it before then sees
  // that it was unlinked, and tries again.
  if (lock_) (void)lock_->remove();
  for (const fs::path& folder : created_) {
    std::error_code error;
    if (!fs::remove(folder, error)) break;  // the folder is not empty, so it stays
  }
}

}  // namespace cadre::train
