#include "cadre/train/run_folder.h"

#include <filesystem>
#include <system_error>

#include "cadre/base/error.h"
#include "cadre/base/format.h"

namespace cadre::train {
namespace {

namespace fs = std::filesystem;

void check(const std::error_code& error, const std::string& what) {
  if (error) {
    throw Error(ErrorCode::kUnavailable, cadre::format("{}: {}", what, error.message()));
  }
}

bool is_used(const std::string& folder) {
  std::error_code error;
  return fs::exists(folder, error) && !fs::is_empty(folder, error);
}

}  // namespace

std::optional<std::string> find_snapshot(const RunConfig& run, const SnapshotFolder& snapshots) {
  if (run.resume == "none") return std::nullopt;
  if (run.resume == "auto") return snapshots.latest();
  if (run.resume == "best") {
    if (auto best = snapshots.best()) return best;
    throw Error(ErrorCode::kInvalidArgument,
                "run.resume = best: no snapshot was marked as the best; run.keep_best marks them");
  }
  if (fs::exists(run.resume + "/state.json")) return run.resume;
  // The folder of a whole run will do, too.
  if (const auto latest = SnapshotFolder(run.resume).latest()) return latest;
  throw Error(
      ErrorCode::kInvalidArgument,
      cadre::format("run.resume = {}: no snapshot there; expected none, auto, best, or a folder "
                    "with state.json",
                    run.resume));
}

std::string prepare_run_folder(const std::string& folder, const RunFolderOptions& options) {
  std::string moved;
  std::error_code error;
  if (!options.keep && is_used(folder)) {
    int number = 1;
    do {
      moved = cadre::format("{}.{}", folder, number++);
    } while (fs::exists(moved, error));
    fs::rename(folder, moved, error);
    check(error, cadre::format("move {} to {}", folder, moved));
  }
  fs::create_directories(folder, error);
  check(error, cadre::format("create {}", folder));
  return moved;
}

}  // namespace cadre::train
