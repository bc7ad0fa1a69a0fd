#include "cadre/train/trainer/snapshots/run_origin.h"

#include <algorithm>
#include <filesystem>
#include <span>
#include <sstream>
#include <system_error>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"

namespace cadre::train {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxOriginBytes = 1 << 20;

// Returns two lines: one with the step and the steps to set aside, and one with the path.
std::string encode(const RunOrigin& origin) {
  std::string text = std::to_string(origin.step);
  for (const int64_t step : origin.abandoned) text += cadre::format(" {}", step);
  return cadre::format("{}\n{}\n", text, origin.snapshot);
}

std::optional<RunOrigin> decode(const std::string& text) {
  const size_t end = text.find('\n');
  if (end == std::string::npos || text.size() < end + 3 || text.back() != '\n') return std::nullopt;
  std::istringstream numbers(text.substr(0, end));
  RunOrigin origin;
  if (!(numbers >> origin.step)) return std::nullopt;
  for (int64_t step = 0; numbers >> step;) origin.abandoned.push_back(step);
  if (!numbers.eof()) return std::nullopt;
  origin.snapshot = text.substr(end + 1, text.size() - end - 2);
  return origin;
}

}  // namespace

std::string RunOrigin::path_of(const std::string& run_folder) {
  return run_folder + "/origin";
}

std::optional<RunOrigin> RunOrigin::read(const std::string& run_folder) {
  const std::string path = path_of(run_folder);
  std::error_code error;
  if (!fs::exists(path, error)) return std::nullopt;
  const std::string text = os::read_file(path, kMaxOriginBytes).value_or_throw();
  if (auto origin = decode(text)) return origin;
  throw Error(
      ErrorCode::kCorruption,
      cadre::format("{} is damaged: expected a line with the step of a snapshot, and a line "
                    "with its path; name the snapshot in run.resume",
                    path));
}

void RunOrigin::write(const std::string& run_folder) const {
  const std::string text = encode(*this);
  os::replace_file(path_of(run_folder), std::as_bytes(std::span(text))).value_or_throw();
}

std::optional<std::string> followed_origin(const SnapshotFolder& snapshots) {
  const std::optional<RunOrigin> origin = RunOrigin::read(snapshots.run_folder());
  if (!origin) return std::nullopt;
  for (const int64_t step : snapshots.steps()) {
    const bool is_of_other_branch =
        step < origin->step ||
        std::ranges::find(origin->abandoned, step) != origin->abandoned.end();
    if (!is_of_other_branch) return std::nullopt;
  }
  const fs::path snapshot = origin->snapshot;
  return snapshot.is_absolute() ? snapshot.string()
                                : (fs::path(snapshots.run_folder()) / snapshot).string();
}

std::optional<std::string> followed_or_latest(const SnapshotFolder& snapshots) {
  const std::optional<std::string> origin = followed_origin(snapshots);
  if (!origin) return snapshots.latest();
  std::error_code error;
  if (fs::exists(*origin, error)) return origin;
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("run.resume: the run in {} has continued from {}, which is no "
                            "longer there, and has no later snapshot: name another one, or start "
                            "at step 0 with run.resume=none",
                            snapshots.run_folder(), *origin));
}

}  // namespace cadre::train
